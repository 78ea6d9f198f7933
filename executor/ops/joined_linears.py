"""Linear layers that read the same tensor: its gradient adds up in their products, with no sum of its own.

Autograd adds the gradients that several readers of a tensor send back, two tensors read and one written at a time. Of
linear layers (query, key and value projections, or a gate and its factor) each product can add to what the one before
it left (``addmm`` in place: the kernel reads what is there as it writes).

The tensor is handed to them through a node of its own (`_Read`), which autograd runs when all of them are done, those
whose results nobody used as well; it returns what they have added up. That goes from one to the other outside of
autograd's edges: they are to run on one stream.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakTensorKeyDictionary

from executor.redistribute import Redistributor
from executor.torch_internals import current_backward_pass, local_of, run_function

R, P = Replicate(), Partial()

_Layouts = tuple[tuple[Placement, ...], tuple[Placement, ...]]


class JoinedLinears:
    """Runs the linear layers of a sharded model, and knows which tensor each of them reads."""

    def __init__(self) -> None:
        self._reads: MutableMapping[torch.Tensor, _Reading] = WeakTensorKeyDictionary()

    def __call__(
        self, redistributor: Redistributor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:
        """Return ``input @ weight.T + bias``; NotImplemented where nothing is joined.

        So it is where anything is plain, where ``input`` needs no gradient or is a leaf (its node would hold it), and
        under autocast, whose casts differ from layer to layer.
        """
        given = (input, weight) if bias is None else (input, weight, bias)
        joins = torch.is_grad_enabled() and input.requires_grad and not input.is_leaf
        if not joins or not all(isinstance(tensor, DTensor) for tensor in given):
            return NotImplemented
        kind = input.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return NotImplemented
        reading = self._reads.get(input)
        if reading is None or not reading.is_of(input):
            reading = self._reads[input] = _Reading.of(input, redistributor)
        return run_function(_Linear, reading.alias, weight, bias, reading.total)


class _Total:
    """The gradient of one tensor [rows, width], as far as a backward pass has run the products of its readers."""

    def __init__(self, redistributor: Redistributor) -> None:
        self.redistributor = redistributor
        self._sums: dict[int, dict[_Layouts, DTensor]] = defaultdict(dict)

    def add(self, gradient: DTensor, weight: DTensor) -> None:
        """Add ``gradient`` [rows, outputs] times ``weight`` [outputs, width]."""
        # What a pass leaves that broke off, or that asked for other gradients alone, is none of another's.
        sums = self._sums[current_backward_pass()]
        layouts = tuple(gradient.placements), tuple(weight.placements)
        there = sums.get(layouts)
        if there is None:
            sums[layouts] = cast(DTensor, gradient @ weight)
        elif tuple(there.placements) == _layout_of_product(*layouts):
            local_of(there).addmm_(local_of(gradient), local_of(weight))
        else:
            sums[layouts] = cast(DTensor, there + gradient @ weight)

    def take(self) -> torch.Tensor | None:
        """Return what this pass has added, and forget it; None where that is nothing."""
        found = list(self._sums.pop(current_backward_pass(), {}).values())
        return functools.reduce(operator.add, found) if found else None


@dataclass(frozen=True, slots=True)
class _Reading:
    """A tensor that linear layers read: as they are given it, as it was then, and its gradient."""

    alias: torch.Tensor
    total: _Total
    version: tuple[int, int]
    made_by: Any

    @classmethod
    def of(cls, x: torch.Tensor, redistributor: Redistributor) -> _Reading:
        total = _Total(redistributor)
        return cls(run_function(_Read, x, total), total, _version(x), x.grad_fn)

    def is_of(self, x: torch.Tensor) -> bool:
        """Tell whether ``x`` has not been changed in place since."""
        return self.version == _version(x) and self.made_by is x.grad_fn


def _version(x: torch.Tensor) -> tuple[int, int]:
    return x._version, local_of(cast(DTensor, x))._version


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
    def forward(ctx: Any, x: DTensor, total: _Total) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.total, ctx.shape = total, x.shape
        return x.detach()

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
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.total = total
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return (None,) * 4
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear layers whose gradients are joined have no second derivative (create_graph=True): plan without "
                "--fused-ops (fused_ops=False)"
            )
        x, weight = ctx.saved_tensors
        arrived = ctx.total.redistributor.as_dtensor(gradient)
        rows = arrived.reshape(-1, arrived.shape[-1])
        ctx.total.add(rows, weight)
        of_weight = None if x is None else rows.t() @ x.reshape(-1, x.shape[-1])
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return None, of_weight, of_bias, None
