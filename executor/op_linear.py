"""Linear layers that read the same tensor: its gradient adds up in their products, with no sum of its own.

Autograd adds the gradients that several readers of a tensor send back, two tensors read and one written at a time. Of
linear layers (query, key and value projections, or a gate and its factor) each product can add to what the one before
it left (``addmm`` in place: the kernel reads what is there as it writes).

The tensor is handed to them through a node of its own (`_Read`), which autograd runs when all of them are done, those
whose results nobody used as well; it returns what they have added up.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import MutableMapping
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakTensorKeyDictionary

from executor.redistribute import Redistributor
from executor.torch_internals import like_dtensor, local_of, run_function, spec_of

R, P = Replicate(), Partial()

_Layouts = tuple[tuple[Placement, ...], tuple[Placement, ...]]


class JoinedLinears:
    """Runs the linear layers of one module, and knows which tensor each of them reads."""

    def __init__(self) -> None:
        self._reads: MutableMapping[torch.Tensor, _Reading] = WeakTensorKeyDictionary()

    def __call__(
        self, redistributor: Redistributor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:
        """Return ``x @ weight.T + bias``; NotImplemented where there is no gradient of ``x``, or anything is plain."""
        given = (x, weight) if bias is None else (x, weight, bias)
        if not (torch.is_grad_enabled() and x.requires_grad and all(isinstance(tensor, DTensor) for tensor in given)):
            return NotImplemented
        reading = self._reads.get(x)
        if reading is None:
            total = _Total()
            reading = self._reads[x] = _Reading(run_function(_Read, x, total), total)
        return run_function(_Linear, reading.alias, weight, bias, reading.total)


class _Total:
    """The gradient of one tensor [rows, width], as far as the products of its readers have been run."""

    def __init__(self) -> None:
        self._sums: dict[_Layouts, DTensor] = {}

    def add(self, gradient: DTensor, weight: DTensor) -> None:
        """Add ``gradient`` [rows, outputs] times ``weight`` [outputs, width]."""
        layouts = tuple(gradient.placements), tuple(weight.placements)
        there = self._sums.get(layouts)
        if there is None:
            self._sums[layouts] = cast(DTensor, gradient @ weight)
        elif tuple(there.placements) == _layout_of_product(*layouts):
            local_of(there).addmm_(local_of(gradient), local_of(weight))
        else:
            self._sums[layouts] = cast(DTensor, there + gradient @ weight)

    def take(self) -> torch.Tensor | None:
        """Return what was added, and start again; None where nothing was."""
        found, self._sums = list(self._sums.values()), {}
        return functools.reduce(operator.add, found) if found else None


class _Reading(NamedTuple):
    """A tensor that linear layers read, as they are given it, and its gradient."""

    alias: torch.Tensor
    total: _Total


def _layout_of_product(left: tuple[Placement, ...], right: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    """Return the layout of a product of matrices whose pieces are the products of pieces; None where they are not."""
    found = [_placement_of_product(a, b) for a, b in zip(left, right, strict=True)]
    return None if None in found else tuple(place for place in found if place is not None)


def _placement_of_product(left: Placement, right: Placement) -> Placement | None:
    if right == R and (left in (R, P) or left.is_shard(0)):
        return left
    if left == R and (right == P or right.is_shard(1)):
        return right
    return P if left == Shard(1) and right == Shard(0) else None


class _Read(torch.autograd.Function):
    """A tensor as linear layers are given it."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, total: _Total) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.total, ctx.shape = total, x.shape
        return like_dtensor(local_of(x), spec_of(x))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        assert gradient is None, "linear layers send nothing back by themselves"
        total = ctx.total.take()
        return None if total is None else total.reshape(ctx.shape), None


class _Linear(torch.autograd.Function):
    """What autograd runs for a linear layer, but for the gradient of its input: that goes to the total."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, weight: DTensor, bias: DTensor | None, total: _Total) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return (None,) * 4
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            ctx.total.add(rows, weight)
        of_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return None, of_weight, of_bias, None
