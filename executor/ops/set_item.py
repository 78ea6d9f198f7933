"""Assignment to a part of a DTensor, ``tensor[..., 0] = value``, as encoder-decoders shift their labels.

DTensor has no rule for ``fill_`` with a tensor. Where the part lies on a sharded dim, DTensor would gather it, and the
assignment would change a copy. Nor has it one for masks (`planner.model_rewrites.replaced_calls.assignments`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from executor.redistribute import Redistributor
from executor.torch_internals.dtensor import local_of, storage_key
from planner.errors import RunError
from planner.model_rewrites.replaced_calls.assignments import assigned_values


def set_item(redistributor: Redistributor, tensor: torch.Tensor, index: Any, value: Any) -> Any:
    """Assign ``value``, a number or a tensor, to ``tensor[index]``.

    NotImplemented unless ``index`` is basic indexing, or a mask with the same value for all that it selects.

    Raises:
        RunError: ``index`` takes a part of a dim that is sharded.
    """
    parts = index if isinstance(index, tuple) else (index,)
    is_basic = all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)
    if not isinstance(tensor, DTensor):
        return NotImplemented
    assigned = assigned_values(tensor, index, value)
    if assigned is not None:
        return tensor.copy_(assigned)
    if not is_basic:
        return NotImplemented
    view = tensor[index]
    assert isinstance(view, DTensor)
    if storage_key(local_of(view)) != storage_key(local_of(tensor)):
        placements = ", ".join(map(str, tensor.placements))
        raise RunError(
            f"The forward assigns to a part of a tensor of shape {tuple(tensor.shape)} along a dim that is sharded "
            f"({placements}).",
            what_to_do="Plan with a pin that keeps this dim whole, or build the tensor with torch.cat.",
        )
    if isinstance(value, torch.Tensor):
        view.copy_(redistributor.as_dtensor(value))
    else:
        view.zero_().add_(value)
    return None
