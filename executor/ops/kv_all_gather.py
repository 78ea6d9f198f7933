"""Keys and values of all ranks of an axis, gathered in one collective, and their gradients scattered in one."""

from __future__ import annotations

from typing import Any

import torch

from executor import torch_internals
from executor.torch_internals import waited

ByRank = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Pieces [batch, heads, rows, width] of keys, and of values, one for each rank."""


class Gathering:
    """Keys and values that are on their way."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, group: Any) -> None:
        """Start to gather this rank's ``k`` and ``v`` [batch, heads, rows, width] over ``group``."""
        self.shapes = k.shape, v.shape
        packed = k.new_empty(k.numel() + v.numel())
        packed[: k.numel()].view(k.shape).copy_(k)
        packed[k.numel() :].view(v.shape).copy_(v)
        self._arriving = torch_internals.start_all_gather(packed, 0, group)

    def wait(self) -> ByRank:
        """Return the pieces of all ranks, which share memory."""
        k_shape, v_shape = self.shapes
        by_rank = waited(self._arriving).view(-1, k_shape.numel() + v_shape.numel())
        del self._arriving
        return _views(by_rank, k_shape, v_shape)


class Scattering:
    """Sums over ranks that go to the rank whose keys and values they are of."""

    def __init__(self, shapes: tuple[torch.Size, torch.Size], ranks: int) -> None:
        """Take the shapes of a rank's keys and values, [batch, heads, rows, width]."""
        self._shapes, self._ranks = shapes, ranks

    def addends(self, like: torch.Tensor) -> ByRank:
        """Return room for this rank's addends, of the dtype of ``like``: to be filled before `start`."""
        self._addends = like.new_empty(self._ranks, sum(shape.numel() for shape in self._shapes))
        return _views(self._addends, *self._shapes)

    def start(self, group: Any) -> None:
        """Send the addends."""
        self._arriving = torch_internals.reduce_scatter(self._addends, 0, "sum", group)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums for this rank's keys, and its values."""
        k_shape, v_shape = self._shapes
        arrived = waited(self._arriving).view(-1)
        del self._addends  # until now, whichever way they are sent
        return arrived[: k_shape.numel()].view(k_shape), arrived[k_shape.numel() :].view(v_shape)


def _views(by_rank: torch.Tensor, k_shape: torch.Size, v_shape: torch.Size) -> ByRank:
    keys, values = by_rank[:, : k_shape.numel()], by_rank[:, k_shape.numel() :]
    return [each.view(k_shape) for each in keys], [each.view(v_shape) for each in values]
