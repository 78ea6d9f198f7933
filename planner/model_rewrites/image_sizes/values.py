"""Values of integer inputs that are on the meta device, and tensors that stay plain numbers."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

_values: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
"""Meta tensor -> its values. Global, because example inputs pass through code that sees tensors alone."""

_numbers: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, whose values every rank knows: no graph has it, and in a run it stays a plain tensor."""
    _numbers[tensor] = True
    return tensor


def is_numbers(tensor: object) -> bool:
    """Return whether ``tensor`` is one of those of `as_numbers`."""
    return isinstance(tensor, torch.Tensor) and tensor in _numbers


def with_values(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, which is on meta, whose values are known from now on.

    Args:
        tensor: any meta tensor.
        values: of its shape, on the CPU.
    """
    _values[tensor] = values
    return tensor


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of ``tensor`` on the CPU; None: it is on meta or fake, and they are not known."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return _values.get(tensor)
    return tensor.detach().cpu()


MOST_KEPT = 1 << 22
"""Integers of a tensor whose values are kept."""


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor like ``tensor``, whose values are known if they are integers that are known."""
    moved = torch.empty_like(tensor, device="meta")
    is_kept = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= MOST_KEPT
    values = values_of(tensor) if is_kept else None
    return moved if values is None else with_values(moved, values)
