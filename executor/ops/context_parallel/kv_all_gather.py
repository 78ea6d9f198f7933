"""All-gather of keys and values in one collective, and reduce-scatter of their gradients in one."""

from __future__ import annotations

from typing import Any

import torch

from executor.torch_internals import dtensor as torch_internals
from executor.torch_internals.dtensor import waited

ByRank = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Keys and values, each a list of one tensor [batch, heads, rows, width] per rank."""


class KVAllGather:
    """An all-gather of keys and values that has started."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, group: Any) -> None:
        """Start to all-gather this rank's ``k`` and ``v`` [batch, heads, rows, width] over ``group``."""
        self.shapes = k.shape, v.shape
        flat = k.new_empty(k.numel() + v.numel())
        flat[: k.numel()].view(k.shape).copy_(k)
        flat[k.numel() :].view(v.shape).copy_(v)
        self._gathered = torch_internals.start_all_gather(flat, 0, group)

    def wait(self) -> ByRank:
        """Return the keys and values of all ranks, which share memory."""
        k_shape, v_shape = self.shapes
        by_rank = waited(self._gathered).view(-1, k_shape.numel() + v_shape.numel())
        del self._gathered
        return _views(by_rank, k_shape, v_shape)


class KVReduceScatter:
    """A reduce-scatter of the gradients of keys and values: each rank gets the sums for its own keys and values."""

    def __init__(self, shapes: tuple[torch.Size, torch.Size], ranks: int) -> None:
        """Take the shapes of one rank's keys and values, [batch, heads, rows, width], and the number of ranks."""
        self._shapes, self._ranks = shapes, ranks

    def allocate(self, like: torch.Tensor) -> ByRank:
        """Return uninitialized addends to every rank's gradients, in the dtype of ``like``; fill before ``start``."""
        self._addends = like.new_empty(self._ranks, sum(shape.numel() for shape in self._shapes))
        return _views(self._addends, *self._shapes)

    def start(self, group: Any) -> None:
        """Start to reduce the addends over ``group``."""
        self._reduced = torch_internals.reduce_scatter(self._addends, 0, "sum", group)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of this rank's keys and of its values."""
        k_shape, v_shape = self._shapes
        reduced = waited(self._reduced).view(-1)
        del self._addends  # the running collective reads them until now
        return reduced[: k_shape.numel()].view(k_shape), reduced[k_shape.numel() :].view(v_shape)


def _views(by_rank: torch.Tensor, k_shape: torch.Size, v_shape: torch.Size) -> ByRank:
    keys, values = by_rank[:, : k_shape.numel()], by_rank[:, k_shape.numel() :]
    return [each.view(k_shape) for each in keys], [each.view(v_shape) for each in values]
