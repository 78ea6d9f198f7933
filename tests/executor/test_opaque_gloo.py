"""Opaque modules run on whole tensors or on each rank's samples, and train as the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gloo import run_on_gloo
from support.value_modules import VALUE_MODULES
from torch import Tensor
from torch.distributed.tensor import DTensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner import build_plan
from planner.plan.sharding_plan import ShardingPlan

STEPS = 3

SPLITS = {
    "experts in a loop": {"blocks.*.experts": "0=0;0"},
    "experts that some ranks do not use": {"experts": "0=0;0"},
    "rows found by values": {"": "0=0 1=0;mean"},
    "labels that are counted": {"": ""},
    "a branch on a sum": {"": ""},
    "scaled by a buffer": {"scale": ""},
}


def made(name: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    module, inputs = VALUE_MODULES[name]()
    return module.train(), inputs


def plan_of(name: str, planner: str = "ilp", **options: Any) -> ShardingPlan:
    module, inputs = made(name)
    given = {"cluster": "1x4xtoy", "mesh": "dp=2,tp=2", "dtype": "fp32", "micro_batches": 1, **options}
    return build_plan(module, example_inputs=inputs, planner=planner, **given)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(output: Tensor) -> Tensor:
    return output if output.dim() == 0 else output.square().mean()


def largest_errors(rank: int, plans: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, tuple[float, float, float]]:
    """Return plan -> the largest errors of a loss, and of a parameter and a buffer after steps of AdamW."""
    return {key: _errors(ShardingPlan.from_dict(text), name) for key, (name, text) in plans.items()}


def _errors(plan: ShardingPlan, name: str) -> tuple[float, float, float]:
    (reference, inputs), (model, _) = made(name), made(name)
    mesh = device_mesh_for(plan, device_type="cpu")
    shard_module(model, mesh, plan)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (reference, model)]
    worst = 0.0
    for _ in range(STEPS):
        expected, loss = loss_of(reference(*inputs)), loss_of(model(*local_batch(inputs, mesh, plan)))
        worst = max(worst, abs(whole(loss.detach()).item() - expected.item()))
        for optimizer, value in zip(optimizers, (expected, loss), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return (
        worst,
        _difference(reference.parameters(), model.parameters()),
        _difference(reference.buffers(), model.buffers()),
    )


def _difference(ones: Any, others: Any) -> float:
    pairs = list(zip(ones, others, strict=True))
    return max(((whole(other.detach()) - one.detach()).abs().max().item() for one, other in pairs), default=0.0)


@pytest.fixture(scope="module")
def plans() -> dict[str, ShardingPlan]:
    return {
        **{name: plan_of(name) for name in VALUE_MODULES},
        **{f"{name}, random": plan_of(name, "random:5") for name in VALUE_MODULES},
        "experts in a loop, checkpointed": plan_of("experts in a loop", ac="full"),
        "experts in a loop, any mesh": plan_of("experts in a loop", mesh=None),
        "experts in a loop, fully-sharded": plan_of("experts in a loop", "fully-sharded"),
    }


@pytest.fixture(scope="module")
def errors(plans: dict[str, ShardingPlan]) -> dict[str, tuple[float, float, float]]:
    return run_on_gloo(largest_errors, 4, {key: (key.split(", ")[0], plan.to_dict()) for key, plan in plans.items()})[0]


def test_losses_parameters_and_buffers_are_those_of_the_unsharded_module(
    errors: dict[str, tuple[float, float, float]],
) -> None:
    assert {key: values for key, values in errors.items() if max(values) >= 1e-5} == {}


@pytest.mark.parametrize("name", VALUE_MODULES)
def test_plans_name_the_opaque_modules_and_are_verified(plans: dict[str, ShardingPlan], name: str) -> None:
    plan = plans[name]
    assert dict(plan.opaque_modules) == SPLITS[name]
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert plan.solver is not None
    assert plan.solver.name == "ilp"
