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
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from cost_model.layouts.layout import Layout
from cost_model.layouts.linear import linear_gradients, linear_layout
from executor.ops.linear import (
    autocasts,
    contiguous_dtensor,
    linear,
    placements_of,
    run_linear,
    weight_gradients,
    without_repeats,
)
from executor.redistribute import Redistributor
from executor.torch_internals.dtensor import current_backward_pass, local_of, run_function


class SharedInputLinears:
    """Runs the linear layers of a sharded model, and remembers the tensor that each of them reads."""

    def __init__(self) -> None:
        self._inputs: MutableMapping[torch.Tensor, _SharedInput] = WeakTensorKeyDictionary()

    def __call__(
        self, redistributor: Redistributor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:
        """Return ``input @ weight.T + bias``, or NotImplemented for DTensor to run the layer.

        The result is NotImplemented if an argument is a plain tensor, and under autocast, whose casts differ from layer
        to layer. Nothing accumulates if ``input`` needs no gradient or is a leaf (the node would keep a leaf alive).
        """
        tensors = (input, weight) if bias is None else (input, weight, bias)
        if not all(isinstance(tensor, DTensor) for tensor in tensors) or autocasts(input):
            return NotImplemented
        if not torch.is_grad_enabled() or not input.requires_grad or input.is_leaf:
            return linear(redistributor, input, weight, bias)
        shared = self._inputs.get(input)
        if shared is None or not shared.is_current(input):
            shared = self._inputs[input] = _SharedInput.from_tensor(input, redistributor)
        return run_function(_Linear, shared.alias, weight, bias, shared.gradient)


class _InputGradient:
    """The gradient of one tensor [..., width], accumulated over the GEMMs of a backward pass."""

    def __init__(self, redistributor: Redistributor) -> None:
        self.redistributor = redistributor
        self._by_pass: dict[int, dict[Layout, DTensor]] = defaultdict(dict)

    def add(self, gradient: DTensor, weight: DTensor, shape: Sequence[int], layout: Layout | None) -> None:
        """Add ``gradient`` [..., outputs] times ``weight`` [outputs, width].

        Args:
            gradient: gradient of a layer's output.
            weight: weight of the layer.
            shape: shape of the tensor.
            layout: layout of the product, if each rank computes its part from its own shards; None: DTensor runs it.
        """
        # One sum for each pass: the sum of an interrupted pass must not reach another pass.
        sums = self._by_pass[current_backward_pass()]
        if layout is None:
            product = cast(DTensor, (gradient.reshape(-1, gradient.shape[-1]) @ weight).reshape(shape))
            accumulated = sums.get(placements_of(product))
            sums[placements_of(product)] = product if accumulated is None else cast(DTensor, accumulated + product)
            return
        rows = local_of(gradient).reshape(-1, local_of(gradient).shape[-1])
        if layout in sums:
            total = local_of(sums[layout])
            total.view(-1, total.shape[-1]).addmm_(rows, local_of(weight))
        else:
            product_rows = rows @ local_of(weight)
            local = product_rows.view(*local_of(gradient).shape[:-1], product_rows.shape[-1])
            sums[layout] = contiguous_dtensor(self.redistributor, local, layout, shape)

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


class _ReadInput(torch.autograd.Function):
    """The identity; its backward returns the accumulated gradient."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, total: _InputGradient) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.total = total
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        assert gradient is None, "_Linear returns no gradient for its input"
        return ctx.total.take(), None


class _Linear(torch.autograd.Function):
    """A linear layer as autograd runs it, except that the gradient of its input is added to ``total``."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, weight: DTensor, bias: DTensor | None, total: _InputGradient) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        saved = without_repeats(total.redistributor, x) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved, weight)
        ctx.total, ctx.shape, ctx.x_layout = total, tuple(x.shape), placements_of(x)
        bias_layout = None if bias is None else placements_of(bias)
        layout = linear_layout(ctx.x_layout, placements_of(weight), bias_layout, last_dim=x.dim() - 1)
        ctx.is_covered = layout is not None
        return F.linear(x, weight, bias) if layout is None else run_linear(total.redistributor, x, weight, bias, layout)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return (None,) * 4
        if torch.is_grad_enabled():
            raise RuntimeError(
                "shared-input linears have no second derivative (create_graph=True): plan without the "
                "technique fused-ops"
            )
        x, weight = ctx.saved_tensors
        grad_out = ctx.total.redistributor.as_dtensor(gradient)
        layouts = None
        if ctx.is_covered:
            grad_layout, weight_layout = placements_of(grad_out), placements_of(weight)
            layouts = linear_gradients(grad_layout, ctx.x_layout, weight_layout, last_dim=len(ctx.shape) - 1)
        ctx.total.add(grad_out, weight, ctx.shape, None if layouts is None else layouts.input)
        needs_bias = ctx.needs_input_grad[2]
        grad_weight, grad_bias = weight_gradients(
            ctx.total.redistributor, grad_out, x, weight.shape, layouts, bias=needs_bias
        )
        return None, grad_weight, grad_bias, None
