"""A sharded module is freed with its parameters, when nothing refers to it any more."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support.executor_cases import make_batch, make_model
from support.gloo import run_on_gloo

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner import ShardingPlan, build_plan


def alive_after_training(rank: int, plan: dict[str, Any]) -> tuple[bool, int]:
    """Return whether a module is alive that only this function knew, and how many of its parameters are."""
    parsed = ShardingPlan.from_dict(plan)
    mesh = device_mesh_for(parsed, device_type="cpu")

    def train() -> tuple[weakref.ref[Any], list[weakref.ref[Any]]]:
        model, batch = make_model("llama"), make_batch("llama")
        shard_module(model, mesh, parsed)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(**local_batch(batch, mesh, parsed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return weakref.ref(model), [weakref.ref(parameter) for parameter in model.parameters()]

    module, parameters = train()
    gc.collect()
    return module() is not None, sum(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("planner", ["fsdp", "ddp", "tensor-parallel"])
def test_nothing_is_left(planner: str) -> None:
    batch = {name: value for name, value in make_batch("llama").items() if isinstance(value, torch.Tensor)}
    plan = build_plan(
        make_model("llama"), cluster="1x2xtoy", example_inputs={**batch, "use_cache": False}, planner=planner,
        dtype="fp32", headroom=0.0, micro_batches=1, ac="selective",
    )  # fmt: skip
    assert run_on_gloo(alive_after_training, 2, plan.to_dict()) == [(False, 0)] * 2
