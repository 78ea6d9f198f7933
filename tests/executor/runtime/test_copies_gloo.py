"""A copy of a sharded module is a sharded module of its own: it evaluates, trains and is averaged into."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.executor_cases import make_batch, make_model
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.resolve.sharded_as import mesh_of, plan_of
from executor.runtime.optimizer_steps import set_accumulation_steps
from executor.runtime.random_state import random_state
from executor.runtime.whole_batches import whole_batches
from executor.shard import shard_module
from planner import ShardingPlan, build_plan
from planner.errors import PlanMismatchError

Losses = dict[str, list[float]]
OPTIONS: dict[str, dict[str, Any]] = {
    "mlp": {"planner": "ddp"},
    "llama": {"planner": "tensor-parallel", "ac": "selective"},
    "t5": {"planner": "ddp", "ac": "full"},
    "vit": {"planner": "ddp"},
    "mixtral": {"planner": "tensor-parallel"},
}
"""Family -> options of a plan without FSDP groups."""


def loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def value(loss: torch.Tensor) -> float:
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


def evaluated(module: Callable[..., Any], batch: dict[str, Any]) -> list[float]:
    with torch.no_grad():
        return [value(loss_of(module(**batch)))]


def trained(module: nn.Module, batch: dict[str, Any], passes: int = 1) -> list[float]:
    """Return the losses of two steps of SGD, each of some backward passes."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        for _ in range(passes):
            loss = loss_of(module(**batch))
            (loss / passes).backward()
        losses.append(value(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def losses_of_copies(module: nn.Module, batch: dict[str, Any]) -> Losses:
    """Return the losses of a module, of copies of it, and of copies that have outlived what they are copied from."""
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # before the first forward
    table = {}
    for step in range(2):
        table[f"original {step}"] = trained(module, batch)
        average.update_parameters(module)
        table[f"average {step}"] = evaluated(average, batch)
    copied = copy.deepcopy(module)
    table["original 2"] = trained(module, batch)
    table["copy"] = trained(copied, batch)
    again = copy.deepcopy(copied)
    del copied, average, module
    table["two passes"] = trained(again, batch, passes=2)
    table["by forward"] = evaluated(again.forward, batch)
    again.load_state_dict({name: tensor / 2 for name, tensor in again.state_dict().items()})
    table["loaded"] = trained(again, batch)
    return table


def on_ranks(rank: int, family: str, plan: dict[str, Any]) -> tuple[Losses, bool]:
    parsed = ShardingPlan.from_dict(plan)
    mesh = device_mesh_for(parsed, device_type="cpu")
    module = shard_module(make_model(family), mesh, parsed)
    batch = make_batch(family)
    table = losses_of_copies(module, local_batch(batch, mesh, parsed))
    copied = copy.deepcopy(module)
    set_accumulation_steps(copied, 1)
    with whole_batches(copied):
        table["whole"] = evaluated(copied, batch)
    is_same = plan_of(copied) is parsed and mesh_of(copied) is mesh
    return table, is_same and bool((random_state(copied) == random_state(module)).all())


def planned(family: str, **options: Any) -> ShardingPlan:
    return build_plan(
        make_model(family), cluster="1x4xtoy", example_inputs=make_batch(family), dtype="fp32", headroom=0.0,
        micro_batches=1, **options,
    )  # fmt: skip


@pytest.mark.parametrize("family", OPTIONS)
def test_copies_are_those_of_the_unsharded_module(family: str) -> None:
    plan = planned(family, **OPTIONS[family])
    assert not plan.fully_shard
    unsharded, batch = make_model(family), make_batch(family)
    expected = losses_of_copies(unsharded, batch)
    expected["whole"] = evaluated(unsharded, batch)
    for table, is_same in run_on_gloo(on_ranks, 4, family, plan.to_dict()):
        assert is_same
        assert {name: pytest.approx(losses, rel=1e-5, abs=1e-5) for name, losses in expected.items()} == table


def averaged_by_hand(module: nn.Module, second: nn.Module, batch: dict[str, Any]) -> list[float]:
    """Return the losses of the average of a module's parameters over training, which ``second`` holds."""
    second.load_state_dict(module.state_dict())
    losses = []
    for _ in range(2):
        trained(module, batch)
        with torch.no_grad():
            for mean, parameter in zip(second.parameters(), module.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
        losses += evaluated(second, batch)
    return losses


def with_fsdp(rank: int, plan: dict[str, Any]) -> tuple[str, list[float]]:
    parsed = ShardingPlan.from_dict(plan)
    mesh = device_mesh_for(parsed, device_type="cpu")
    module = shard_module(make_model("llama"), mesh, parsed)
    with pytest.raises(PlanMismatchError) as error:
        AveragedModel(module)
    second = shard_module(make_model("llama"), mesh_of(module), plan_of(module))
    return str(error.value), averaged_by_hand(module, second, local_batch(make_batch("llama"), mesh, parsed))


@pytest.mark.parametrize("planner", ["fsdp", "fsdp-tp"])
def test_with_fsdp_groups_the_error_says_what_to_do_and_that_is_right(planner: str) -> None:
    plan = planned("llama", planner=planner)
    assert plan.fully_shard
    expected = averaged_by_hand(make_model("llama"), make_model("llama"), make_batch("llama"))
    for message, losses in run_on_gloo(with_fsdp, 4, plan.to_dict()):
        assert "with FSDP groups cannot be copied" in message
        assert "shard_module(second, mesh_of(module), plan_of(module))" in message
        assert losses == pytest.approx(expected, rel=1e-5)
