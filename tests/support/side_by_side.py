"""A sharded and the unsharded model, trained side by side on real processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.executor_cases import loss_of, make_batch, make_model
from torch.distributed.tensor import DTensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner.plan.sharding_plan import ShardingPlan

STEPS = 2


@dataclass(frozen=True)
class Errors:
    loss: float
    gradient: float
    """Largest difference, relative to the model's largest gradient."""
    tied: bool


def value(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank: int, family: str, plan: dict, optimizer: str) -> Errors:
    """Train the sharded and the unsharded model side by side, and return how far apart they come."""
    read = ShardingPlan.from_dict(plan)
    reference, model = make_model(family), make_model(family)
    names = len(list(model.parameters()))
    mesh = device_mesh_for(read)
    shard_module(model, mesh, read)
    make_optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    rate = 0.05 if optimizer == "sgd" else 1e-3
    optimizers = [make_optimizer(one.parameters(), lr=rate) for one in (reference, model)]
    worst_loss = worst_gradient = 0.0
    for step in range(STEPS):
        batch = make_batch(family, seed=step)
        expected = loss_of(reference(**batch))
        found = loss_of(model(**local_batch(batch, mesh, read)))
        worst_loss = max(worst_loss, abs(value(found).item() - expected.item()))
        expected.backward()
        found.backward()
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        largest = max(gradient.abs().max().item() for gradient in wanted.values())
        for name, parameter in model.named_parameters():
            difference = (value(parameter.grad) - wanted[name]).abs().max().item()
            worst_gradient = max(worst_gradient, difference / largest)
            assert parameter.grad.placements == parameter.placements, name
        for one in optimizers:
            one.step()
            one.zero_grad()
    return Errors(loss=worst_loss, gradient=worst_gradient, tied=len(list(model.parameters())) == names)


def train_all(rank: int, family: str, plans: dict[str, dict], optimizer: str) -> dict[str, Errors]:
    return {name: train(rank, family, plan, optimizer) for name, plan in plans.items()}
