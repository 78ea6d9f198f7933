"""`Selection`: which rows a mask selects, kept with the tensor of all rows; and the calls that select by a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from planner.errors import ModelError
from planner.model_rewrites.tree_paths import tensors_in

_WHOLE = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What selects rows.

    Attributes:
        mask: as it was given, over one or several dims.
        rows: the mask as one dim.
        version: that of the mask when it selected: writes to it count up.
        is_places: whether the rows are places of what the mask selects, as `torch.nonzero` returns them.
    """

    mask: torch.Tensor
    rows: torch.Tensor
    version: int
    is_places: bool = False


_SELECTION = "_shardplan_selection"
"""Attribute of a tensor of rows: its `Selection`."""


def keep_selection(source: torch.Tensor, result: torch.Tensor) -> None:
    """Let ``result``, which is ``source`` in another layout, have its selection, if it has one."""
    selection = selection_of(source)
    if selection is not None:
        setattr(result, _SELECTION, selection)


def selection_of(tensor: Any) -> Selection | None:
    """Return what selected the rows of ``tensor``; None if nothing did."""
    return getattr(tensor, _SELECTION, None)


def may_select(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether a call may select rows: most of those that take a part of a tensor name no other tensor."""
    name = getattr(func, "__name__", "")
    if name != "__getitem__":
        return name in _SELECTING
    parts = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
    return any(isinstance(part, torch.Tensor) for part in parts)


def select_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the rows that a call selects by a mask, or their places; NotImplemented if it does not."""
    name = getattr(func, "__name__", "")
    if name not in _SELECTING or not args or not isinstance(args[0], torch.Tensor) or kwargs.get("out") is not None:
        return NotImplemented
    tensor, given = args[0], {**dict(zip(_SELECTING[name], args[1:], strict=False)), **kwargs}
    if name in ("nonzero", "where"):
        as_tuple = name == "where" or bool(given.get("as_tuple", False))
        return NotImplemented if len(args) > 1 else _places(tensor, as_tuple=as_tuple)
    if name == "index_select" and given.get("dim") != 0:
        return NotImplemented
    if name == "masked_select" and given["mask"].shape != tensor.shape:
        return NotImplemented
    index = given.get("index", given.get("mask"))
    mask = mask_of_index(tensor, index)
    return NotImplemented if mask is None else _rows(tensor, mask)


_SELECTING = {
    "__getitem__": ("index",),
    "masked_select": ("mask",),
    "index_select": ("dim", "index"),
    "nonzero": (),
    "where": (),
}
"""Functions that may select by a mask -> the names of their arguments after the first."""


def mask_of_index(tensor: torch.Tensor, index: Any) -> torch.Tensor | None:
    """Return the mask that ``tensor[index]`` selects by, over the first dims of ``tensor``; None if there is none."""
    parts = list(index) if isinstance(index, (tuple, list)) else [index]
    while len(parts) > 1 and (parts[-1] is Ellipsis or (isinstance(parts[-1], slice) and parts[-1] == _WHOLE)):
        parts.pop()
    if not parts or not all(isinstance(part, torch.Tensor) for part in parts):
        return None
    selection = selection_of(parts[0])
    if selection is not None and selection.is_places:
        if selection.mask.dim() != len(parts) or any(part.dim() != 1 for part in parts):
            return None
        if any((other := selection_of(part)) is None or other.mask is not selection.mask for part in parts):
            return None
        mask = selection.mask
    elif selection is None and len(parts) == 1 and parts[0].dtype == torch.bool and parts[0].dim():
        mask = parts[0]
    else:
        return None
    return mask if tuple(mask.shape) == tuple(tensor.shape[: mask.dim()]) else None


def _places(mask: torch.Tensor, *, as_tuple: bool) -> Any:
    """Return stand-ins for the places of what ``mask`` selects: of several dims only as a tuple."""
    if mask.dtype != torch.bool or not mask.dim() or not (as_tuple or mask.dim() == 1):
        return NotImplemented
    selection = Selection(mask, mask.reshape(-1), mask._version, is_places=True)
    shape = (-1,) if as_tuple else (-1, 1)
    each = [torch.zeros_like(selection.rows, dtype=torch.long).reshape(shape) for _ in range(mask.dim())]
    for place in each:
        setattr(place, _SELECTION, selection)
    return tuple(each) if as_tuple else each[0]


def _rows(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return all rows of ``tensor``, with a number that every function takes in place of what ``mask`` leaves out."""
    condition = mask.reshape(tuple(mask.shape) + (1,) * (tensor.dim() - mask.dim()))
    kept = torch.where(condition, tensor, 1 if tensor.is_floating_point() else 0)
    rows = kept.flatten(0, mask.dim() - 1)
    setattr(rows, _SELECTION, Selection(mask, mask.reshape(-1), mask._version))
    return rows


def mixed_rows(name: str) -> ModelError:
    """Return the error for a function ``name`` that is not known to treat each row by itself."""
    return ModelError(
        f"The forward reads elements that a mask selects by {name}, which is not known to treat each by itself.",
        what_to_do="Compute on all elements, and use the mask in the loss: a mask and torch.where give a fixed shape.",
        cause=f"it reads elements that a mask selects by {name}, which may mix them",
    )


def with_rows(name: str, result: Any, selection: Selection) -> Any:
    """Return ``result`` with its tensors marked as rows of ``selection``."""
    if not have_rows(result, selection):
        raise mixed_rows(name)
    for tensor in tensors_in(result):
        setattr(tensor, _SELECTION, selection)
    return result


def have_rows(result: Any, selection: Selection) -> bool:
    """Return whether all tensors in ``result`` have as many rows as the mask of ``selection`` has elements."""
    count = selection.rows.shape[0]
    return all(tensor.dim() and tensor.shape[0] == count for tensor in tensors_in(result))
