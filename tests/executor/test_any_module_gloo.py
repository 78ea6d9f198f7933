"""Modules as people write them: their plans run as planned, and train as the unsharded modules, on four processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.any_modules import MODULES
from support.gloo import run_on_gloo
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner import build_plan
from planner.plan.sharding_plan import ShardingPlan

STEPS = 3
MESH = "dp=2,tp=2"


def made(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    module, inputs = MODULES[name]()
    assert isinstance(inputs, tuple)
    return module.train(), inputs


def plan_of(name: str, planner: str = "ilp") -> ShardingPlan:
    module, inputs = made(name)
    options: dict[str, Any] = {"cluster": "1x4xtoy", "mesh": MESH, "dtype": "fp32", "micro_batches": 1, "ac": "none"}
    return build_plan(module, example_inputs=inputs, planner=planner, tolerance=0.0, **options)


def loss_of(output: Any) -> Tensor:
    """Return what a caller may compute from the results: from all numbers, or else from the first tensor."""
    results = pytree.tree_leaves(output)
    numbers = [result for result in results if result.dim() == 0]
    return sum(numbers[1:], numbers[0]) if numbers else results[0].square().mean()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def largest_errors(text: dict[str, Any], name: str) -> tuple[float, float]:
    """Return the largest error of a loss, and of a parameter in a step of AdamW, against the unsharded module."""
    plan = ShardingPlan.from_dict(text)
    (reference, inputs), (model, _) = made(name), made(name)
    mesh = device_mesh_for(plan, device_type="cpu")
    shard_module(model, mesh, plan)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (reference, model)]
    loss_error = parameter_error = 0.0
    for _ in range(STEPS):
        expected, loss = loss_of(reference(*inputs)), loss_of(model(*local_batch(inputs, mesh, plan)))
        loss_error = max(loss_error, abs(whole(loss.detach()).item() - expected.item()))
        for optimizer, value in zip(optimizers, (expected, loss), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        for one, other in zip(reference.parameters(), model.parameters(), strict=True):
            parameter_error = max(parameter_error, (whole(other.detach()) - one.detach()).abs().max().item())
    return loss_error, parameter_error


def all_errors(rank: int, plans: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, tuple[float, float]]:
    return {key: largest_errors(text, name) for key, (name, text) in plans.items()}


RANDOM = (
    "a child's weight",
    "a sibling's weight",
    "one weight twice",
    "identity",
    "conv1d",
    "GRU with a state",
    "a block in a loop",
)
"""Modules that are also run under plans with random layouts, of which each is another combination."""


@pytest.fixture(scope="module")
def errors() -> dict[str, tuple[float, float]]:
    plans = {name: (name, plan_of(name).to_dict()) for name in MODULES}
    plans |= {f"{name}, random": (name, plan_of(name, "random:3").to_dict()) for name in RANDOM}
    return run_on_gloo(all_errors, 4, plans)[0]


@pytest.mark.parametrize("name", [*MODULES, *(f"{name}, random" for name in RANDOM)])
def test_losses_and_parameters_are_those_of_the_unsharded_module(
    errors: dict[str, tuple[float, float]], name: str
) -> None:
    loss_error, parameter_error = errors[name]
    assert loss_error < 1e-5
    assert parameter_error < 1e-5


@pytest.mark.parametrize("name", MODULES)
def test_plans_are_verified(name: str) -> None:
    plan = plan_of(name)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert plan.solver is not None
    assert plan.solver.name == "ilp"
