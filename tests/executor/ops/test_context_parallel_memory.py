"""Saved and peak bytes of attention with a sharded sequence are those that are priced, on one rank and on meta."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.op_bytes import bytes_seen
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from executor.ops.context_parallel.attention import context_parallel_attention
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import fake_process_group, make_dtensor
from planner.plan.sharding_plan import PlanMesh, ShardingPlan
from planner.strategies.context_parallel_work import ContextParallelWork

ROWS, WIDTH = 256, 64
LAYOUT = (Shard(2),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Attention over ``ranks``: its heads, key heads, mask and token order."""

    ranks: int
    heads: int
    kv_heads: int
    causal: bool
    is_zigzag: bool

    def measure(self, rank: int) -> tuple[ContextParallelWork, dict[str, int]]:
        """Return the priced work of a rank, and the bytes that were measured on it."""
        local_shapes = [(2, count, ROWS, WIDTH) for count in (self.heads, self.kv_heads, self.kv_heads)]
        with fake_process_group(self.ranks):
            mesh = init_device_mesh("cpu", (self.ranks,), mesh_dim_names=("x",))
            plan = ShardingPlan(mesh=PlanMesh(axes=(("x", self.ranks),), device="cpu"))
            redistributor = Redistributor.from_plan(mesh, plan)
            redistributor.coordinate = lambda axis: rank  # type: ignore[method-assign]
            inputs = []
            for local_shape in local_shapes:
                shape = (*local_shape[:2], ROWS * self.ranks, WIDTH)
                local = torch.empty(local_shape, dtype=torch.bfloat16, device="meta")
                inputs.append(make_dtensor(local, mesh, LAYOUT, shape, contiguous_stride(shape)).requires_grad_())
            options = {"is_causal": self.causal, "is_zigzag": self.is_zigzag}
            seen = bytes_seen(
                lambda: context_parallel_attention(redistributor, 0, inputs, None, scale=None, **options), inputs
            )
        return ContextParallelWork(*local_shapes, 2, self.ranks, self.causal, self.is_zigzag), seen


@pytest.mark.parametrize(("causal", "is_zigzag"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 1), (12, 3), (15, 1), (1, 1)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_are_those_that_are_priced(ranks: int, heads: int, kv_heads: int, causal: bool, is_zigzag: bool) -> None:
    case = Case(ranks=ranks, heads=heads, kv_heads=kv_heads, causal=causal, is_zigzag=is_zigzag)
    work, seen = case.measure(0)
    for rank in range(1, ranks if is_zigzag else 1):  # ranks differ in their peaks
        other = case.measure(rank)[1]
        assert other["saved"] == seen["saved"]
        seen = {name: max(seen[name], other[name]) for name in seen}
    # In addition to what is priced as the op's own: its result, and the queries after their exchange.
    additional = work.result_nbytes + (work.query_nbytes if work.exchanges_chunks else 0)
    assert seen["saved"] == work.saved_nbytes + additional
    # The price includes log-sum-exps that are freed before the last kernel.
    assert 0.9 * work.forward_peak_nbytes <= seen["forward"] <= 1.03 * work.forward_peak_nbytes
    assert seen["backward"] == pytest.approx(work.backward_rise_nbytes, rel=0.001)
