"""Shared-input linears: linear layers that read the same tensor accumulate its gradient in their GEMMs.

Without them, autograd adds the gradients that the readers of a tensor return. Each addition reads two tensors and
writes one. For linear layers (q, k and v projections, or gate and up projections) each GEMM can add to the result of
the GEMM before (``addmm`` in place: the kernel reads the sum as it writes it).

The layers read the tensor through an autograd node of its own (``_ReadInput``). Autograd runs that node after the
backward of all layers whose results were used, and the node returns the accumulated gradient. The gradient is passed
outside of autograd's edges, so all layers have to run on one stream.
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


class SharedInputLinears:
    """Runs the linear layers of a sharded model, and remembers the tensor that each of them reads."""

    def __init__(self) -> None:
        self._inputs: MutableMapping[torch.Tensor, _SharedInput] = WeakTensorKeyDictionary()

    def __call__(
        self, redistributor: Redistributor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:
        """Return ``input @ weight.T + bias``, or NotImplemented for DTensor to run the layer.

        The result is NotImplemented if an argument is a plain tensor, if ``input`` needs no gradient or is a leaf (the
        node would keep a leaf alive), and under autocast, whose casts differ from layer to layer.
        """
        tensors = (input, weight) if bias is None else (input, weight, bias)
        accumulates = torch.is_grad_enabled() and input.requires_grad and not input.is_leaf
        if not accumulates or not all(isinstance(tensor, DTensor) for tensor in tensors):
            return NotImplemented
        kind = input.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return NotImplemented
        shared = self._inputs.get(input)
        if shared is None or not shared.is_current(input):
            shared = self._inputs[input] = _SharedInput.from_tensor(input, redistributor)
        return run_function(_Linear, shared.alias, weight, bias, shared.gradient)


class _InputGradient:
    """The gradient of one tensor [rows, width], accumulated over the GEMMs of a backward pass."""

    def __init__(self, redistributor: Redistributor) -> None:
        self.redistributor = redistributor
        self._by_pass: dict[int, dict[_Layouts, DTensor]] = defaultdict(dict)

    def add(self, gradient: DTensor, weight: DTensor) -> None:
        """Add ``gradient`` [rows, outputs] times ``weight`` [outputs, width]."""
        # One sum for each pass: the sum of an interrupted pass must not reach another pass.
        sums = self._by_pass[current_backward_pass()]
        layouts = tuple(gradient.placements), tuple(weight.placements)
        accumulated = sums.get(layouts)
        if accumulated is None:
            sums[layouts] = cast(DTensor, gradient @ weight)
        elif tuple(accumulated.placements) == _gemm_layout(*layouts):
            local_of(accumulated).addmm_(local_of(gradient), local_of(weight))
        else:
            sums[layouts] = cast(DTensor, accumulated + gradient @ weight)

    def take(self) -> torch.Tensor | None:
        """Return and forget the gradient that this backward pass has accumulated; None if it has run no layer."""
        sums = list(self._by_pass.pop(current_backward_pass(), {}).values())
        return functools.reduce(operator.add, sums) if sums else None


@dataclass(frozen=True, slots=True)
class _SharedInput:
    """A tensor that linear layers read.

    Attributes:
        alias: the tensor as the layers read it.
        gradient: accumulates the gradient of the tensor.
        version: the tensor's version counters when it was first read: its own and its local tensor's.
        grad_fn: the tensor's ``grad_fn`` when it was first read.
    """

    alias: torch.Tensor
    gradient: _InputGradient
    version: tuple[int, int]
    grad_fn: Any

    @classmethod
    def from_tensor(cls, x: torch.Tensor, redistributor: Redistributor) -> _SharedInput:
        gradient = _InputGradient(redistributor)
        return cls(run_function(_ReadInput, x, gradient), gradient, _version(x), x.grad_fn)

    def is_current(self, x: torch.Tensor) -> bool:
        """Return whether ``x`` is unchanged (no op has changed it in place) since it was first read."""
        return self.version == _version(x) and self.grad_fn is x.grad_fn


def _version(x: torch.Tensor) -> tuple[int, int]:
    return x._version, local_of(cast(DTensor, x))._version


def _gemm_layout(left: tuple[Placement, ...], right: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    """Return the layout of a matrix product that each rank computes by one local GEMM; None if that is not possible."""
    placements = [_gemm_placement(a, b) for a, b in zip(left, right, strict=True)]
    return None if None in placements else tuple(place for place in placements if place is not None)


def _gemm_placement(left: Placement, right: Placement) -> Placement | None:
    if right == R and (left in (R, P) or left.is_shard(0)):
        return left
    if left == R and (right == P or right.is_shard(1)):
        return right
    return P if left == Shard(1) and right == Shard(0) else None


class _ReadInput(torch.autograd.Function):
    """The identity; its backward returns the accumulated gradient."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, total: _InputGradient) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.total, ctx.shape = total, x.shape
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        assert gradient is None, "_Linear returns no gradient for its input"
        total = ctx.total.take()
        return None if total is None else total.reshape(ctx.shape), None


class _Linear(torch.autograd.Function):
    """A linear layer as autograd runs it, except that the gradient of its input is added to ``total``."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, weight: DTensor, bias: DTensor | None, total: _InputGradient) -> torch.Tensor:
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
                "shared-input linears have no second derivative (create_graph=True): plan without --fused-ops "
                "(fused_ops=False)"
            )
        x, weight = ctx.saved_tensors
        grad_out = ctx.total.redistributor.as_dtensor(gradient)
        rows = grad_out.reshape(-1, grad_out.shape[-1])
        ctx.total.add(rows, weight)
        grad_weight = None if x is None else rows.t() @ x.reshape(-1, x.shape[-1])
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return None, grad_weight, grad_bias, None
