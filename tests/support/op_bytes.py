"""Saved and peak bytes of an op on DTensors, forward and backward, measured on one rank and on meta."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from executor.torch_internals.dtensor import local_of, make_dtensor
from planner.counting.live_bytes import LiveBytesMode


class LiveBytes(LiveBytesMode):
    """Live bytes, without the copy that waiting for a collective makes of a meta tensor, and of no real one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0].endswith(("wait_tensor", "_wrap_tensor_autograd")):
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


def bytes_seen(op: Callable[[], DTensor], inputs: Sequence[DTensor]) -> dict[str, int]:
    """Return bytes of ``op``: "saved" for backward, the "forward" peak, and the rise in "backward".

    Args:
        op: one call on ``inputs``.
        inputs: of the call, which are not counted.
    """
    saved: dict[int, int] = {}
    input_storages = {_storage_of(tensor)._cdata for tensor in inputs}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in input_storages:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with LiveBytes() as live:
        for tensor in inputs:
            live.ignore(local_of(tensor))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = op()
        forward_peak = live.peak
        local = torch.empty_like(local_of(result))
        layout = tuple(Replicate() if place.is_partial() else place for place in result.placements)
        gradient = make_dtensor(local, result.device_mesh, layout, result.shape, result.stride())
        before = live.now
        live.peak = before
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        gradients = torch.autograd.grad([result], differentiable, [gradient])
        backward_peak = live.peak
    # Gradients that one collective returns share memory.
    gradient_bytes = sum({storage._cdata: storage.nbytes() for storage in map(_storage_of, gradients)}.values())
    return {"saved": sum(saved.values()), "forward": forward_peak, "backward": backward_peak - before - gradient_bytes}


def _storage_of(tensor: DTensor) -> torch.UntypedStorage:
    return local_of(tensor).untyped_storage()
