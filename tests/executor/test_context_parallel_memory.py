"""What is said to be kept and alive of attention with its sequence split is what is there on one rank, on meta."""

from __future__ import annotations

import pytest
import torch
from op_bytes import bytes_seen
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from executor.op_context_parallel import context_parallel_attention
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals import fake_process_group, make_dtensor
from planner.plan import PlanMesh, ShardingPlan
from planner.strategies.context_parallel import ContextWork

RANKS = 4
ROWS, WIDTH = 256, 64
LAYOUT = (Shard(2),)


def measure(kv_heads: int, causal: bool, is_even: bool, rank: int = 0) -> tuple[ContextWork, dict[str, int]]:
    """Return the work that is expected of a rank, and the bytes that are seen there."""
    pieces = [(2, heads, ROWS, WIDTH) for heads in (8, kv_heads, kv_heads)]
    with fake_process_group(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("x",))
        plan = ShardingPlan(mesh=PlanMesh(axes=(("x", RANKS),), device="cpu"))
        redistributor = Redistributor.of_plan(mesh, plan)
        redistributor.coordinate = lambda axis: rank  # type: ignore[method-assign]
        given = []
        for piece in pieces:
            shape = (*piece[:2], ROWS * RANKS, WIDTH)
            local = torch.empty(piece, dtype=torch.bfloat16, device="meta")
            given.append(make_dtensor(local, mesh, LAYOUT, shape, contiguous_stride(shape)).requires_grad_())
        options = {"is_causal": causal, "is_even": is_even}
        seen = bytes_seen(
            lambda: context_parallel_attention(redistributor, 0, given, None, scale=None, **options), given
        )
    return ContextWork(pieces[0], pieces[1], pieces[2], 2, RANKS, causal, is_even), seen


@pytest.mark.parametrize(("causal", "is_even"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_bytes_are_those_that_are_priced(kv_heads: int, causal: bool, is_even: bool) -> None:
    work, seen = measure(kv_heads, causal, is_even)
    for rank in range(1, RANKS if is_even else 1):  # which ranks have most differs
        other = measure(kv_heads, causal, is_even, rank)[1]
        assert other["kept"] == seen["kept"]
        seen = {name: max(seen[name], other[name]) for name in seen}
    # Beside its inputs: the result that the kernel made, of which this is the owner, and the queries that it got.
    beside = work.result_nbytes + (work.query_nbytes if work.exchanged else 0)
    assert seen["kept"] == work.saved_nbytes + beside
    assert seen["forward"] == pytest.approx(work.forward_peak_nbytes, rel=0.02)
    assert seen["backward"] == pytest.approx(work.backward_rise_nbytes, rel=0.02)
