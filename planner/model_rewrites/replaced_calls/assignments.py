"""Assignments to parts of a tensor, as ops.

``tensor[mask] = value`` runs by `torch.where`, where the value is the same for all elements that the mask selects:
SpecAugment puts a learned vector in place of masked frames this way, and masked image models a mask token. How many
elements a mask selects is a matter of values, for which DTensor has no rule.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

_WHOLE = slice(None)


def masked_values(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor | None:
    """Return ``tensor`` after ``tensor[index] = value``, as a new tensor; None where that is no such assignment.

    It is one if ``index`` has one boolean mask and else whole dims, and the value has no dim of selected elements.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    masks = [part for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.bool and part.dim()]
    others = [part for part in parts if not any(part is mask for mask in masks)]
    if len(masks) != 1 or not all(isinstance(part, slice) and part == _WHOLE for part in others):
        return None
    (mask,) = masks
    before = next(position for position, part in enumerate(parts) if part is mask)
    after = tensor.dim() - before - mask.dim()
    if isinstance(value, torch.Tensor):
        if value.dim() > after:
            return None
    elif not isinstance(value, (int, float)):
        return None
    shape = (1,) * before + tuple(mask.shape) + (1,) * after
    new = value.to(tensor.dtype) if isinstance(value, torch.Tensor) else value
    return torch.where(mask.reshape(shape), new, tensor)


def scattered_values(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor | None:
    """Return ``tensor`` after ``tensor[index] = value``, as a new tensor; None where that is no such assignment.

    It is one if ``value`` is a tensor that needs a gradient, and ``index`` takes a slice or one element of one dim, as
    in ``out[..., 0::2] = x``.
    """
    if not (isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()):
        return None
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is Ellipsis or type(part) in (int, slice) for part in parts):
        return None
    taken = [(position, part) for position, part in enumerate(parts) if part is not Ellipsis and part != _WHOLE]
    if len(taken) != 1:
        return None
    ((position, part),) = taken
    dim = position - len(parts) if Ellipsis in parts[:position] else position
    shape = [*tensor.shape]
    if isinstance(part, int):
        del shape[dim]
    else:
        shape[dim] = len(range(*part.indices(tensor.shape[dim])))
    if value.dim() > len(shape):
        return None
    new = value.to(tensor.dtype).expand(shape)
    if isinstance(part, int):
        return torch.select_scatter(tensor, new, dim, part)
    return torch.slice_scatter(tensor, new, dim, *part.indices(tensor.shape[dim]))


def assigned_values(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor | None:
    """Return ``tensor`` after ``tensor[index] = value``, as a new tensor; None where the assignment runs in place."""
    masked = masked_values(tensor, index, value)
    return scattered_values(tensor, index, value) if masked is None else masked


@contextmanager
def assignments_as_ops() -> Iterator[None]:
    """Within this context, assignments by a mask, or of what needs gradients, are ops that have rules and backwards."""
    assign = torch.Tensor.__setitem__

    @functools.wraps(assign)
    def as_ops(tensor: torch.Tensor, index: Any, value: Any) -> None:
        new = assigned_values(tensor, index, value)
        if new is None:
            assign(tensor, index, value)
        else:
            tensor.copy_(new)

    with mock.patch.object(torch.Tensor, "__setitem__", as_ops):
        yield
