"""Memory of redistributed copies, and the number of their recomputations, on fake processes with real memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from support.executor_cases import FP32, MESH, S0, R
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from executor.redistribute import Redistributor
from executor.resolve.mesh import device_mesh_for
from executor.runtime.shared_redistributions import SharedRedistributions
from executor.shard import shard_module
from executor.torch_internals.dtensor import fake_process_group, local_of
from planner.plan.sharding_plan import Port, ShardingPlan


@pytest.fixture
def ranks() -> Iterator[None]:
    with fake_process_group(4):
        yield


class SavesOften(nn.Module):
    """Saves its weight three times for backward, once as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.mm(x, self.weight) * self.weight, self.weight).sum()


@pytest.mark.usefixtures("ranks")
def test_a_slice_has_a_storage_of_its_own() -> None:
    plan = ShardingPlan(mesh=MESH, job=FP32, plan={})
    device_mesh = device_mesh_for(plan)
    replicated = DTensor.from_local(torch.randn(8, 8), device_mesh, (R, R), run_check=False)
    local = local_of(Redistributor.from_plan(device_mesh, plan).to_layout(replicated, (S0, R)))
    assert local.untyped_storage().nbytes() == local.nbytes < local_of(replicated).nbytes


@pytest.mark.usefixtures("ranks")
def test_gathered_parameters_are_freed_after_the_call_and_recomputed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ShardingPlan(
        mesh=MESH,
        job=FP32,
        plan={"weight": (S0, S0)},
        compute_plan={"weight": (R, R)},
        input_plan={"input": {"x": Port(layout=(R, R))}},
    )
    model = shard_module(SavesOften(), device_mesh_for(plan), plan, src_data_rank=None)
    copies: list[StorageWeakRef] = []
    original = Redistributor.to_layout

    def recorded(self, tensor, target):
        result = original(self, tensor, target)
        if target == (R, R) and tensor.shape == (8, 8) and tuple(tensor.placements) != target:
            copies.append(StorageWeakRef(local_of(result).untyped_storage()))
        return result

    monkeypatch.setattr(Redistributor, "to_layout", recorded)
    loss = model(torch.randn(8, 8, requires_grad=True))
    gc.collect()
    assert [copy.expired() for copy in copies] == [True]
    loss.backward()
    gc.collect()
    assert [copy.expired() for copy in copies] == [True, True]


@pytest.mark.usefixtures("ranks")
def test_results_are_shared_as_long_as_their_source_lives() -> None:
    plan = ShardingPlan(mesh=MESH)
    mesh = device_mesh_for(plan, device_type="cpu")
    redistributor = Redistributor.from_plan(mesh, plan)
    shared = SharedRedistributions(redistributor)
    source = redistributor.as_dtensor(torch.randn(8, 8)).requires_grad_() * 1
    with shared.scope():
        first = shared.redistribute(source, (S0, R))
        assert shared.redistribute(source, (S0, R)) is first
        assert shared.redistribute(source, (S0, R), grad=(S0, S0)) is not first
        assert shared.redistribute(source * 1, (S0, R)) is not first
        memory = StorageWeakRef(local_of(first).untyped_storage())
        with shared.scope():
            assert shared.redistribute(source, (S0, R)) is not first
        del first
        assert not memory.expired()
        del source
        gc.collect()
        assert memory.expired()
