"""A rank that is killed in sharding or in a step: the others raise."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.executor_cases import FP32, S0, R
from support.killed_rank import errors_of_survivors, kill_me
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from executor import shard
from executor.agreement import batches
from executor.resolve.batch import local_batch
from executor.shard import shard_module
from planner.plan.sharding_plan import PlanMesh, Port, ShardingPlan

PLAN = ShardingPlan(
    mesh=PlanMesh.parse("dp=4"),
    plan={"*.*": (R,)},
    input_plan={"input": {"x": Port(layout=(S0,))}},
    job=FP32,
)
KILLED = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x)).square().mean()


def killed_before_sharding(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    if rank == KILLED:
        kill_me()
    shard_module(Model(), mesh, PLAN, agreement_timeout_s=3.0)


def killed_in_placing(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    if rank == KILLED:
        shard.place_parameters = lambda *_args, **_options: kill_me()  # type: ignore[assignment]
    shard_module(Model(), mesh, PLAN)


def trained(rank: int, killed_call: int, place: str) -> None:
    batches._PATIENCE_S = 2.0  # type: ignore[misc]
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = shard_module(Model(), mesh, PLAN)

    def kill(gradient: torch.Tensor) -> None:
        kill_me()

    for call in range(1, 9):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(call))
        is_last = rank == KILLED and call == killed_call
        if is_last and place == "between steps":
            kill_me()
        loss: Any = model(**local_batch({"x": x}, mesh, PLAN))
        if is_last and place == "backward":
            loss.register_hook(kill)
        loss.backward()
        model.zero_grad()


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (killed_before_sharding, "Rank 2 did not come to the agreement before sharding within 3 s"),
        (killed_in_placing, "another rank has probably ended"),
        (functools.partial(trained, killed_call=4, place="between steps"), "onnection"),
        (functools.partial(trained, killed_call=3, place="backward"), "onnection"),
    ],
    ids=["before sharding", "in placing", "between steps", "in backward"],
)
def test_the_other_ranks_raise(fn: Any, words: str) -> None:
    keywords = getattr(fn, "keywords", {})
    errors = errors_of_survivors(getattr(fn, "func", fn), 4, *keywords.values())
    assert set(errors) == {0, 1, 3}
    for rank, text in errors.items():
        assert words in text, f"rank {rank}:\n{text}"
