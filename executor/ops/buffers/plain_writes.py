"""Writes to plain tensors, such as buffers, of values that are DTensors: every rank writes the whole value.

A plain tensor counts as replicated. DTensor refuses to write to one, or writes to a redistributed copy that is then
lost. Here the written values are first made whole, axis by axis, the last axis first: an all-gather where an axis
shards the value, an all-reduce where its sum is partial. ``planner.strategies.buffer_writes`` prices the same
collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from executor.redistribute import Redistributor
from executor.torch_internals.dtensor import local_of
from planner.model_rewrites.tree_paths import tensors_in


def whole(redistributor: Redistributor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a DTensor as a plain tensor, outside autograd; a plain tensor is returned as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    layout = tuple(tensor.placements)
    for axis in reversed(range(len(layout))):
        if layout[axis] != Replicate():
            layout = (*layout[:axis], Replicate(), *layout[axis + 1 :])
            tensor = redistributor.to_layout(tensor, layout)
    return local_of(tensor)


def write_to_plain(
    redistributor: Redistributor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of ``func``, if it writes a DTensor to a plain tensor; otherwise NotImplemented.

    A value whose gradient is recorded is not covered, because the plain tensor would have to become sharded.
    """
    written = kwargs.get("out", args[0] if args and _writes_first(func) else None)
    targets = tensors_in(written)
    if not targets or any(isinstance(target, DTensor) for target in targets):
        return NotImplemented
    values = [tensor for tensor in tensors_in((args, dict(kwargs))) if isinstance(tensor, DTensor)]
    if not values or (torch.is_grad_enabled() and any(value.requires_grad for value in values)):
        return NotImplemented
    make_whole = functools.partial(whole, redistributor)
    args, kwargs = pytree.tree_map_only(DTensor, make_whole, (args, dict(kwargs)))
    return func(*args, **kwargs)


@functools.cache
def _writes_first(func: Callable[..., Any]) -> bool:
    """Return whether a function writes to its first argument, by torch's convention for names."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        # __iadd__ and its siblings; __invert__ and __index__ are no such names.
        return name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"))
    return name.endswith("_")
