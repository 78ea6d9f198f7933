"""Is what a sharded model computes what the unsharded one does? For ranks of a gloo process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner.plan.sharding_plan import ShardingPlan

TOLERANCE = 1e-5
"""Of a loss, and of gradients relative to the largest of all."""


def differences(
    plans: Mapping[str, Mapping[str, Any]],
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], dict[str, Any]],
) -> list[str]:
    """Return where loss or gradients of one step are not the unsharded model's.

    Args:
        plans: documents of plans, by names to speak of them.
        make_model: returns equal models, each time it is called and on every rank.
        make_batch: likewise the global batch.
    """
    return [
        f"{name}: {wrong}"
        for name, plan in plans.items()
        for wrong in _of_step(ShardingPlan.from_dict(plan), make_model, make_batch)
    ]


def _of_step(
    plan: ShardingPlan, make_model: Callable[[], nn.Module], make_batch: Callable[[], dict[str, Any]]
) -> list[str]:
    mesh = device_mesh_for(plan)
    reference, model = make_model(), make_model()
    shard_module(model, mesh, plan)
    expected, found = reference(**make_batch()).loss, model(**local_batch(make_batch(), mesh, plan)).loss
    expected.backward()
    found.backward()
    wrong = [] if abs(found.full_tensor().item() - expected.item()) <= TOLERANCE else [f"{found} for {expected}"]
    wanted = {fqn: parameter.grad for fqn, parameter in reference.named_parameters()}
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    for fqn, parameter in model.named_parameters():
        difference = (parameter.grad.full_tensor() - wanted[fqn]).abs().max().item() / largest
        if difference > TOLERANCE:
            wrong.append(f"gradient of {fqn}, by {difference}")
    return wrong
