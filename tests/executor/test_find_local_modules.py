"""Modules run on local tensors only where their gradients come as FSDP reduces them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from executor.find_local_modules import find_local_modules
from executor.verify import observed_collectives
from planner.errors import PlanLayoutError
from planner.plan.job import Job
from planner.plan.sharding_plan import PlanMesh, Port, ShardingPlan

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
LOCAL = {"norm": "0=S(0),R;S(0),R"}
INPUTS = (torch.zeros(4, 8, device="meta"),)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


def plan_of(*, is_split_by_tp: bool, is_addend: bool) -> ShardingPlan:
    """Return a plan with the norm's weight in an FSDP group on dp; the linears may be tensor parallel.

    Args:
        is_addend: whether the norm's gradient is a sum over tp that is reduced once a step.
    """
    return ShardingPlan(
        mesh=PlanMesh(axes=(("dp", 2), ("tp", 2)), device="cpu"),
        job=Job(phase="training", dtype="fp32", reduce_dtype="fp32"),
        plan={
            "norm.weight": (S0, R),
            "up.weight": (R, S0 if is_split_by_tp else R),
            "down.weight": (R, S1 if is_split_by_tp else R),
        },
        compute_plan={"norm.weight": (R, R)},
        gradient_plan={"norm.weight": (S0, P if is_addend else R)},
        fully_shard={"norm": ("weight",)},
        input_plan={"": {"0": Port(layout=(S0, R))}},
    )


def test_a_module_whose_gradient_is_reduced_on_the_axes_that_split_it_is_local() -> None:
    plan = plan_of(is_split_by_tp=False, is_addend=False)
    assert find_local_modules(Normed(), plan, INPUTS) == LOCAL


def test_a_module_whose_gradient_is_an_addend_on_an_axis_that_does_not_split_it_is_left_to_dtensor() -> None:
    plan = plan_of(is_split_by_tp=True, is_addend=True)
    observed_collectives(Normed(), plan, INPUTS)
    with pytest.raises(PlanLayoutError, match="comes as"):
        observed_collectives(Normed(), dataclasses.replace(plan, local_modules=LOCAL), INPUTS)
    assert find_local_modules(Normed(), plan, INPUTS) == {}


def test_a_frozen_weight_has_no_gradient_that_could_differ() -> None:
    module = Normed()
    module.norm.weight.requires_grad_(False)
    assert find_local_modules(module, plan_of(is_split_by_tp=True, is_addend=True), INPUTS) == LOCAL
