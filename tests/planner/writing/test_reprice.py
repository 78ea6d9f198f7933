"""Plans that a person wrote: priced as they run, or refused with the place that cannot be priced."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from cost_model import ClusterSpec
from executor.verify import verify
from planner import ShardingPlan, build_plan, estimate_plan
from planner.errors import PlanMismatchError
from planner.plan.sharding_plan import Job, PlanMesh

R = Replicate()
INPUTS = (torch.zeros(8, 16),)


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = Linears()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.linears(x), labels)


def megatron(prefix: str = "", **ports: Any) -> ShardingPlan:
    """Column-wise, then row-wise, as in the README."""
    weights = {"up.weight": (R, Shard(0)), "up.bias": (R, Shard(0)), "down.weight": (R, Shard(1))}
    return ShardingPlan(
        mesh=PlanMesh.parse("dp=2,tp=2"),
        plan={prefix + name: layout for name, layout in weights.items()},
        input_plan={"input": (Shard(0), R)},
        job=Job(dtype="fp32"),
        cluster=ClusterSpec.parse("1x4xtoy").to_dict(),
        **ports,
    )


def test_the_only_argument_needs_no_name() -> None:
    plan = megatron(output_plan={"": (Shard(0), R)})
    named = dataclasses.replace(plan, input_plan={"input": {"0": (Shard(0), R)}})
    found = [estimate_plan(Linears(), each, example_inputs=INPUTS).estimate for each in (plan, named)]
    assert found[0] == found[1]
    assert found[0] is not None


def test_a_model_without_a_loss_gets_a_note() -> None:
    """What computes the loss from its results is not priced."""
    plan = build_plan(Linears(), cluster="1x4xtoy", example_inputs=INPUTS, mesh="x=2,y=2", micro_batches=1, ac="none")
    assert any("no loss" in note for note in plan.notes)
    module, inputs = WithLoss(), (*INPUTS, torch.zeros(8, dtype=torch.long))
    plan = build_plan(module, cluster="1x4xtoy", example_inputs=inputs, mesh="x=2,y=2", micro_batches=1, ac="none")
    assert not plan.notes


def test_the_reduction_of_a_result_that_is_no_loss_is_priced_and_runs() -> None:
    priced = estimate_plan(Linears(), megatron(output_plan={"": (Shard(0), R)}), example_inputs=INPUTS)
    assert priced.estimate is not None
    assert ("all_reduce", "tp") in {(row.kind, row.axis) for row in priced.estimate.collectives}
    assert verify(Linears(), priced, example_inputs=INPUTS).equal


def test_a_result_is_laid_out_where_it_leaves_the_root() -> None:
    with pytest.raises(PlanMismatchError, match=r"output_plan.*cannot be priced"):
        estimate_plan(Linears(), megatron(output_plan={"down": (Shard(0), R)}), example_inputs=INPUTS)


def test_a_result_that_stays_a_partial_sum_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="cannot run without further redistribution"):
        estimate_plan(Linears(), megatron(), example_inputs=INPUTS)


def test_the_reduction_before_the_loss_is_priced_and_runs() -> None:
    module, inputs = WithLoss(), (*INPUTS, torch.zeros(8, dtype=torch.long))
    plan = megatron("linears.", output_plan={"linears": (Shard(0), R), "": (R, R)})
    plan = dataclasses.replace(plan, input_plan={"input": [(Shard(0), R), (Shard(0), R)]})
    priced = estimate_plan(module, plan, example_inputs=inputs)
    assert priced.estimate is not None
    assert ("all_reduce", "tp") in {(row.kind, row.axis) for row in priced.estimate.collectives}
    assert verify(module, priced, example_inputs=inputs).equal


def test_the_module_that_cannot_run_so_is_the_one_named() -> None:
    """down is computed in pieces of its inputs, but the bias of up says that its outputs are whole."""
    plan = megatron()
    wrong = dataclasses.replace(plan, plan={**plan.plan, "up.bias": (R, R)})
    with pytest.raises(PlanMismatchError, match=r"around module 'up'.*up\.bias computed \(R, R\)"):
        estimate_plan(Linears(), wrong, example_inputs=INPUTS)
