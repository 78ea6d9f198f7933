"""Linear layers and products of activations, in the layouts in which each rank needs only its own shards.

DTensor flattens [batch, seq, hidden] to two dims. If batch and sequence are both sharded, the flat dim is sharded in
strides. DTensor then refuses shards of length 1, and on meshes of three axes it spends minutes on the cheapest way to
redistribute such tensors. Here the local tensors are flattened instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate

from cost_model.layouts.layout import Layout
from cost_model.layouts.linear import LinearGradients, linear_gradients, linear_layout
from cost_model.layouts.products import gathered_axes, product_gradients, product_layout
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function


def linear(
    redistributor: Redistributor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Any:
    """Return ``input`` [..., in] times ``weight`` [out, in] plus ``bias`` [out], as [..., out].

    It is NotImplemented, so that DTensor runs the layer, if an argument is a plain tensor, under autocast, and in
    layouts that `linear_layout` does not cover.
    """
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if not all(isinstance(tensor, DTensor) for tensor in tensors) or autocasts(input):
        return NotImplemented
    layout = linear_layout(*map(placements_of, tensors), last_dim=input.dim() - 1)
    return NotImplemented if layout is None else run_function(_Linear, input, weight, bias, redistributor, layout)


def autocasts(tensor: torch.Tensor) -> bool:
    """Return whether autocast is on for the device type of ``tensor``."""
    kind = tensor.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def placements_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a DTensor."""
    return tuple(cast(DTensor, tensor).placements)


def run_linear(
    redistributor: Redistributor, x: DTensor, weight: DTensor, bias: DTensor | None, layout: Layout
) -> DTensor:
    """Return the output of a covered layer, in ``layout``."""
    # Where the output is partial, one rank alone adds the bias.
    adds_bias = all(not place.is_partial() or redistributor.coordinate(axis) == 0 for axis, place in enumerate(layout))
    local_bias = None if bias is None or not adds_bias else local_of(bias)
    result = F.linear(local_of(x), local_of(weight), local_bias)
    return contiguous_dtensor(redistributor, result, layout, (*x.shape[:-1], weight.shape[0]))


def weight_gradients(
    redistributor: Redistributor,
    gradient: DTensor,
    x: DTensor | None,
    weight_shape: Sequence[int],
    layouts: LinearGradients | None,
    *,
    bias: bool,
) -> tuple[DTensor | None, DTensor | None]:
    """Return the gradients of a layer's weight and bias.

    Args:
        redistributor: has the device mesh.
        gradient: gradient of the output [..., out].
        x: the input [..., in]; None: the weight needs no gradient.
        weight_shape: global shape of the weight, (out, in).
        layouts: layouts of the gradients, if each rank computes its part from its own shards; None: DTensor runs it.
        bias: whether the bias needs a gradient.
    """
    rows: torch.Tensor
    if layouts is None:
        rows = _rows(gradient)
        grad_weight = None if x is None else rows.t() @ _rows(x)
        return cast(DTensor | None, grad_weight), cast(DTensor, rows.sum(0)) if bias else None
    rows = _rows(local_of(gradient))
    own_weight = own_bias = None
    if x is not None:
        local = rows.t() @ _rows(local_of(x))
        own_weight = contiguous_dtensor(redistributor, local, layouts.weight, weight_shape)
    if bias:
        own_bias = contiguous_dtensor(redistributor, rows.sum(0), layouts.bias, weight_shape[:1])
    return own_weight, own_bias


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` [..., n] as rows, [rows, n]; the last chunk of an uneven shard may be empty (n = 0)."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def contiguous_dtensor(
    redistributor: Redistributor, local: torch.Tensor, layout: Layout, shape: Sequence[int]
) -> DTensor:
    """Return the contiguous DTensor of global ``shape`` whose local tensor is ``local``."""
    return make_dtensor(local, redistributor.device_mesh, layout, shape, contiguous_stride(shape))


def without_repeats(redistributor: Redistributor, x: DTensor) -> DTensor:
    """Return ``x``; where it is expanded, such as queries that all samples share, a copy, as torch saves for a linear.

    What is saved is then no view of a parameter, which the backward would gather again.
    """
    local = local_of(x)
    if all(stride or size < 2 for size, stride in zip(local.shape, local.stride(), strict=True)):
        return x
    return contiguous_dtensor(redistributor, local.contiguous(), placements_of(x), x.shape)


class _Linear(torch.autograd.Function):
    """A covered linear layer. DTensor runs the backward if the gradient arrives in a layout that is not covered."""

    @staticmethod
    def forward(
        ctx: Any, x: DTensor, weight: DTensor, bias: DTensor | None, redistributor: Redistributor, layout: Layout
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        saved = without_repeats(redistributor, x) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved, weight if ctx.needs_input_grad[0] else None)
        ctx.redistributor, ctx.x_layout, ctx.shape = redistributor, placements_of(x), tuple(x.shape)
        ctx.weight_layout, ctx.weight_shape = placements_of(weight), tuple(weight.shape)
        return run_linear(redistributor, x, weight, bias, layout)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        redistributor: Redistributor = ctx.redistributor
        x, weight = ctx.saved_tensors
        grad_out = redistributor.as_dtensor(gradient)
        layouts = None
        if not torch.is_grad_enabled():
            last_dim = len(ctx.shape) - 1
            layouts = linear_gradients(placements_of(grad_out), ctx.x_layout, ctx.weight_layout, last_dim=last_dim)
        grad_x: torch.Tensor | None = None
        if weight is not None and layouts is None:
            grad_x = (grad_out.reshape(-1, grad_out.shape[-1]) @ weight).reshape(ctx.shape)
        elif weight is not None and layouts is not None:
            local = local_of(grad_out)
            rows = _rows(local) @ local_of(weight)
            local_x = rows.view(*local.shape[:-1], rows.shape[-1])
            grad_x = contiguous_dtensor(redistributor, local_x, layouts.input, ctx.shape)
        needs_bias = ctx.needs_input_grad[2]
        grad_weight, grad_bias = weight_gradients(
            redistributor, grad_out, x, ctx.weight_shape, layouts, bias=needs_bias
        )
        return grad_x, grad_weight, grad_bias, None, None


_FACTORS = ("input", "other", "mat2")
"""Names of the factors in torch's functions and methods, in order."""


def product(redistributor: Redistributor, *factors: torch.Tensor, **by_name: Any) -> Any:
    """Return the product of [m, k] and [k, n].

    The second factor may be gathered inside, as contrastive losses need it (``cost_model.layouts.products``).

    It is NotImplemented, so that DTensor runs the product, if a factor is plain or complex, under autocast, and in
    layouts that `product_layout` does not cover.
    """
    factors = (*factors, *(by_name.pop(name) for name in _FACTORS if name in by_name))
    if by_name or len(factors) != 2 or not all(isinstance(factor, DTensor) for factor in factors):
        return NotImplemented
    first, second = factors
    if first.is_complex() or autocasts(first) or [first.dim(), second.dim()] != [2, 2]:
        return NotImplemented
    layout = product_layout(placements_of(first), placements_of(second))
    return NotImplemented if layout is None else run_function(_Product, first, second, redistributor, layout)


class _Product(torch.autograd.Function):
    """Saves both factors as they are, and gathers the second again for the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, first: DTensor, second: DTensor, redistributor: Redistributor, layout: Layout) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(first if ctx.needs_input_grad[1] else None, second if ctx.needs_input_grad[0] else None)
        ctx.redistributor, ctx.shapes = redistributor, (tuple(first.shape), tuple(second.shape))
        ctx.layouts = placements_of(first), placements_of(second)
        result = local_of(first) @ _whole(redistributor, second, gathered_axes(*ctx.layouts))
        return contiguous_dtensor(redistributor, result, layout, (first.shape[0], second.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return (None,) * 4
        redistributor: Redistributor = ctx.redistributor
        first, second = ctx.saved_tensors
        grad_out = redistributor.as_dtensor(gradient)
        layouts = None if torch.is_grad_enabled() else product_gradients(placements_of(grad_out), *ctx.layouts)
        if layouts is None:  # by DTensor, which is differentiable again
            of_first = None if second is None else grad_out @ second.t()
            return of_first, None if first is None else first.t() @ grad_out, None, None
        local, axes = local_of(grad_out), gathered_axes(*ctx.layouts)
        grad_first = grad_second = None
        if second is not None:
            rows = local @ _whole(redistributor, second, axes).t()
            grad_first = contiguous_dtensor(redistributor, rows, layouts[0], ctx.shapes[0])
        if first is not None:
            columns = local_of(first).t() @ local
            partial = tuple(Partial() if axis in axes else place for axis, place in enumerate(layouts[1]))
            summed = contiguous_dtensor(redistributor, columns, partial, ctx.shapes[1])
            grad_second = redistributor.to_layout(summed, layouts[1])
        return grad_first, grad_second, None, None


def _whole(redistributor: Redistributor, tensor: DTensor, axes: Sequence[int]) -> torch.Tensor:
    """Return the local tensor of ``tensor`` after it is gathered on ``axes``."""
    target = tuple(Replicate() if axis in axes else place for axis, place in enumerate(placements_of(tensor)))
    return local_of(redistributor.to_layout(cast(DTensor, tensor.detach()), target))
