"""What one rank keeps and has alive of an op on DTensors, forward and backward, seen on meta."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from executor.torch_internals import local_of, make_dtensor
from planner.profile.dispatch_peak import LiveBytesMode


class LiveBytes(LiveBytesMode):
    """Of a meta tensor that has arrived torch makes another; a real one is the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0].endswith(("wait_tensor", "_wrap_tensor_autograd")):
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


def bytes_seen(op: Callable[[], DTensor], given: Sequence[DTensor]) -> dict[str, int]:
    """Return bytes of ``op``: what its forward keeps, its forward's peak, and its backward's rise.

    Args:
        op: one call, on ``given``.
        given: its inputs, which are counted nowhere.
    """
    kept: dict[int, int] = {}
    known = {_storage_of(tensor)._cdata for tensor in given}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with LiveBytes() as live:
        for tensor in given:
            live.ignore(local_of(tensor))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = op()
        forward_peak = live.peak
        arriving = torch.empty_like(local_of(found))
        layout = tuple(Replicate() if place.is_partial() else place for place in found.placements)
        gradient = make_dtensor(arriving, found.device_mesh, layout, found.shape, found.stride())
        before = live.now
        live.peak = before
        wanted = [tensor for tensor in given if tensor.requires_grad]
        gradients = torch.autograd.grad([found], wanted, [gradient])
        backward_peak = live.peak
    # Gradients that come in one message share memory.
    left = sum({storage._cdata: storage.nbytes() for storage in map(_storage_of, gradients)}.values())
    return {"kept": sum(kept.values()), "forward": forward_peak, "backward": backward_peak - before - left}


def _storage_of(tensor: DTensor) -> torch.UntypedStorage:
    return local_of(tensor).untyped_storage()
