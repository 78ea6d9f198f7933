"""Activations that are all-gathered again in backward: collectives as planned, memory freed, numbers unchanged."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.executor_cases import FP32, MESH, S0, R
from support.families import make
from support.gloo import run_on_gloo
from support.side_by_side import train_all
from torch import nn
from torch.distributed.tensor import Partial
from torch.multiprocessing.reductions import StorageWeakRef

from executor.redistribute import Redistributor
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from executor.torch_internals.dtensor import fake_process_group, local_of
from executor.verify import verify
from planner import PlanningSession
from planner.errors import PlanTypeError
from planner.plan.sharding_plan import Port, ShardingPlan

BATCH = 8
TOLERANCE = 1e-5
P = Partial()


@functools.lru_cache(maxsize=1)
def session(family: str, **job: Any) -> PlanningSession:
    module, inputs = make(family, BATCH * job.get("micro_batches", 1))
    job = {"dtype": "fp32", "optimizer": "sgd", "micro_batches": 1, "ac": "none", "reallgather": True, **job}
    return PlanningSession(module, cluster="1x4xtoy", example_inputs=inputs, **job)


@pytest.mark.parametrize(
    ("family", "job", "seeds"),
    [
        pytest.param("llama", {"fused_ops": True}, 6, marks=pytest.mark.slow),
        ("llama", {"micro_batches": 2}, 3),
        ("gpt2", {}, 3),
        pytest.param("llama", {}, 20, marks=pytest.mark.slow),
        pytest.param("mixtral", {}, 10, marks=pytest.mark.slow),
        pytest.param("t5", {}, 10, marks=pytest.mark.slow),
    ],
)
def test_plans_run_as_planned(family: str, job: dict[str, Any], seeds: int) -> None:
    reallgathering = 0
    for mesh in ("dp=2,tp=2", "dp=1,tp=4"):
        for planner in ("ilp", "tensor-parallel", *(f"random:{seed}" for seed in range(seeds))):
            if planner == "tensor-parallel" and family != "llama":
                continue
            module, inputs = make(family, BATCH)
            plan = session(family, **job).plan(planner=planner, mesh=mesh)
            report = verify(module, plan, inputs)
            assert report.equal, (mesh, planner, report.differences)
            reallgathering += plan.reallgathers
            assert ShardingPlan.from_dict(plan.to_dict()) == plan
    assert reallgathering


def reallgathering_plans(family: str, planners: list[str]) -> dict[str, dict[str, Any]]:
    plans = {planner: session(family).plan(planner=planner, mesh="dp=2,tp=2") for planner in planners}
    assert sum(plan.reallgathers for plan in plans.values()) >= 2
    return {planner: plan.to_dict() for planner, plan in plans.items()}


def test_losses_and_gradients_equal_the_unsharded_models() -> None:
    plans = reallgathering_plans("llama", [f"random:{seed}" for seed in (0, 1, 3)])
    for errors in run_on_gloo(train_all, 4, "llama", plans, "sgd"):
        for planner, error in errors.items():
            assert error.loss <= TOLERANCE, (planner, error)
            assert error.gradient <= TOLERANCE, (planner, error)


class Reader(nn.Module):
    """Reads one tensor in three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(x)
        return (self.q(x) * self.k(x)).sum() + self.v(x).sum()


def reader_plan(*reallgathered: str) -> ShardingPlan:
    """Return a plan that all-gathers the input of all layers, again in backward for those in ``reallgathered``."""
    split = (S0, R)
    ports = {
        f"{name}.input": Port(
            layout=(R, R), grad=(P, R), source=split, source_grad=split, reallgather=name in reallgathered
        )
        for name in ("q", "k", "v")
    }
    return ShardingPlan(mesh=MESH, job=FP32, input_plan={"input": {"x": Port(layout=split)}, **ports})


def test_a_copy_is_freed_after_its_readers_and_recomputed_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[StorageWeakRef] = []
    original = Redistributor.to_layout

    def recorded(self, tensor, target):
        result = original(self, tensor, target)
        if target == (R, R) and tuple(tensor.placements) == (S0, R):
            copies.append(StorageWeakRef(local_of(result).untyped_storage()))
        return result

    monkeypatch.setattr(Redistributor, "to_layout", recorded)
    with fake_process_group(4):
        plan = reader_plan("q", "k")
        model = shard_module(Reader(), device_mesh_for(plan), plan, src_data_rank=None)
        for _ in range(2):  # two micro-batches
            copies.clear()
            loss = model(torch.randn(4, 8))
            gc.collect()
            # One for q and k, and one for v, which is saved.
            assert [copy.expired() for copy in copies] == [True, False]
            loss.backward()
            gc.collect()
            assert [copy.expired() for copy in copies] == [True, True, True]


def test_user_hooks_see_saved_tensors_but_no_copy() -> None:
    with fake_process_group(4):
        plan = reader_plan("q", "k", "v")
        model = shard_module(Reader(), device_mesh_for(plan), plan, src_data_rank=None)
        seen: list[tuple[int, ...]] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(tensor.to_local().shape if hasattr(tensor, "to_local") else tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(4, 8, requires_grad=True))
        # relu's local result, three weights, two factors; no copy.
        assert sorted(seen) == [(4, 8), *[(8, 8)] * 5]
        loss.backward()


def test_without_gradients_nothing_is_saved() -> None:
    with fake_process_group(4), torch.no_grad():
        plan = reader_plan("q", "k", "v")
        model = shard_module(Reader(), device_mesh_for(plan), plan, src_data_rank=None)
        assert model(torch.randn(4, 8)).shape == ()


def test_only_arguments_can_be_all_gathered_again() -> None:
    port = Port(layout=(R, R), source=(S0, R), reallgather=True)
    with pytest.raises(PlanTypeError, match="reallgather"):
        ShardingPlan(mesh=MESH, job=FP32, output_plan={"q": port}).validate()
