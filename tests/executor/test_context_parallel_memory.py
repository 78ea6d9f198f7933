"""What is said to be kept and alive of attention with its sequence split is what is there on one rank, on meta."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from executor.op_attention import attention
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals import fake_process_group, local_of, make_dtensor
from planner.live_bytes import _LiveBytes
from planner.plan import PlanMesh, ShardingPlan
from planner.strategies.context_parallel import ContextWork

RANKS = 4
ROWS, WIDTH = 256, 64
LAYOUT = (Shard(2),)


class LiveBytes(_LiveBytes):
    """Of a meta tensor that has arrived torch makes another; a real one is the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0].endswith(("wait_tensor", "_wrap_tensor_autograd")):
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure(kv_heads: int, causal: bool) -> tuple[ContextWork, dict[str, int]]:
    """Return the work that is expected of one rank, and the bytes that are seen there."""
    pieces = [(2, heads, ROWS, WIDTH) for heads in (8, kv_heads, kv_heads)]
    kept: dict[int, int] = {}
    with fake_process_group(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("x",))
        plan = ShardingPlan(mesh=PlanMesh(axes=(("x", RANKS),), device="cpu"))
        redistributor = Redistributor.of_plan(mesh, plan)
        given = []
        for piece in pieces:
            shape = (*piece[:2], ROWS * RANKS, WIDTH)
            local = torch.empty(piece, dtype=torch.bfloat16, device="meta")
            given.append(make_dtensor(local, mesh, LAYOUT, shape, contiguous_stride(shape)).requires_grad_())
        known = {local_of(tensor).untyped_storage()._cdata for tensor in given}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        with LiveBytes() as live:
            for tensor in given:
                live.know(local_of(tensor))
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                found = attention(redistributor, *given, is_causal=causal, enable_gqa=True)
            forward_peak = live.peak
            arriving = make_dtensor(torch.empty_like(local_of(found)), mesh, LAYOUT, found.shape, found.stride())
            before = live.now
            live.peak = before
            gradients = torch.autograd.grad([found], given, [arriving])
            backward_peak = live.peak
    left = sum(local_of(tensor).untyped_storage().nbytes() for tensor in gradients)
    work = ContextWork(pieces[0], pieces[1], pieces[2], 2, RANKS, causal)
    return work, {"kept": sum(kept.values()), "forward": forward_peak, "backward": backward_peak - before - left}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_bytes_are_those_that_are_priced(kv_heads: int, causal: bool) -> None:
    work, seen = measure(kv_heads, causal)
    # Beside its inputs: the result that the kernel made, of which this is the owner, and the queries that it got.
    beside = work.result_nbytes + (work.query_nbytes if causal else 0)
    assert seen["kept"] == work.saved_nbytes + beside
    assert seen["forward"] == pytest.approx(work.forward_peak_nbytes, rel=0.02)
    assert seen["backward"] == pytest.approx(work.backward_rise_nbytes, rel=0.02)
