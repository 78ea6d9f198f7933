"""Convolution of one to three dims, transposed or not, with the batch or the output channels sharded on any axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function

R = Replicate()
_Sizes = int | tuple[int, ...]


def convolution(dims: int) -> Callable[..., Any]:
    """Return the own op of ``torch.conv1d``, ``torch.conv2d`` or ``torch.conv3d``, for 1, 2 or 3 dims.

    A mesh axis may shard nothing, the batch, or the output channels (with ``groups=1``). The result is NotImplemented
    for all other layouts, for ``padding="same"`` with one more element on one side, and for an input without a batch.
    """

    def run(
        redistributor: Redistributor,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: _Sizes = 1,
        padding: str | _Sizes = 0,
        dilation: _Sizes = 1,
        groups: int = 1,
    ) -> Any:
        steps, spacing = _per_dim(stride, dims), _per_dim(dilation, dims)
        if padding == "same":
            totals = [step * (length - 1) for step, length in zip(spacing, weight.shape[2:], strict=True)]
            if any(total % 2 for total in totals):
                return NotImplemented
            padding = tuple(total // 2 for total in totals)
        around = _per_dim(0 if isinstance(padding, str) else padding, dims)  # "valid": none
        options = (steps, around, spacing, False, [0] * dims, groups)
        return _convolution(redistributor, input, weight, bias, options)

    return run


def transposed_convolution(dims: int) -> Callable[..., Any]:
    """Return the own op of ``torch.conv_transpose1d`` and so on; layouts as for `convolution`."""

    def run(
        redistributor: Redistributor,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: _Sizes = 1,
        padding: _Sizes = 0,
        output_padding: _Sizes = 0,
        groups: int = 1,
        dilation: _Sizes = 1,
    ) -> Any:
        steps, around, more, spacing = (_per_dim(x, dims) for x in (stride, padding, output_padding, dilation))
        return _convolution(redistributor, input, weight, bias, (steps, around, spacing, True, more, groups))

    return run


def _per_dim(sizes: _Sizes, dims: int) -> tuple[int, ...]:
    """Return one number for each dim: torch accepts a single one."""
    numbers = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return numbers * dims if len(numbers) == 1 else numbers


def _convolution(
    redistributor: Redistributor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: tuple[Any, ...],
) -> Any:
    """Return the convolution; ``options`` are those of ``aten.convolution`` from the strides on."""
    images, kernel = redistributor.as_dtensor(input), redistributor.as_dtensor(weight)
    bias = None if bias is None else redistributor.as_dtensor(bias)
    if images.dim() != kernel.dim():
        return NotImplemented
    output = _output_layout(images, kernel, bias, options)
    if output is None:
        return NotImplemented
    return run_function(_Convolution, images, kernel, bias, redistributor, output, options)


def _channels(options: tuple[Any, ...]) -> Shard:
    """Return the shard of the weight's output channels."""
    is_transposed = options[3]
    return Shard(1 if is_transposed else 0)


def _output_layout(images: DTensor, kernel: DTensor, bias: DTensor | None, options: tuple[Any, ...]) -> Layout | None:
    """Return the layout of the output; None where the layouts of the inputs are not covered."""
    output: list[Placement] = []
    channels, groups = _channels(options), options[5]
    for axis, (x, w) in enumerate(zip(images.placements, kernel.placements, strict=True)):
        b = bias.placements[axis] if bias is not None else Shard(0) if w == channels else w
        if (x, w, b) == (R, R, R):
            output.append(R)
        elif (x, w, b) == (Shard(0), R, R):
            output.append(Shard(0))
        elif (x, w, b) == (R, channels, Shard(0)) and groups == 1:
            output.append(Shard(1))
        else:
            return None
    return tuple(output)


class _Convolution(torch.autograd.Function):
    """Runs the kernel on local tensors; gradients are partial where the forward sums over a sharded dim."""

    @staticmethod
    def forward(
        ctx: Any,
        images: DTensor,
        kernel: DTensor,
        bias: DTensor | None,
        redistributor: Redistributor,
        output: Layout,
        options: tuple[Any, ...],
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        x, w = local_of(images), local_of(kernel)
        result = torch.ops.aten.convolution.default(x, w, None if bias is None else local_of(bias), *options)
        ctx.save_for_backward(x, w)
        ctx.redistributor, ctx.output, ctx.options = redistributor, output, options
        ctx.shapes = tuple(images.shape), tuple(kernel.shape)
        channels = kernel.shape[_channels(options).dim] * (options[5] if options[3] else 1)
        shape = (images.shape[0], channels, *result.shape[2:])
        return make_dtensor(result.contiguous(), redistributor.device_mesh, output, shape, contiguous_stride(shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 6
        redistributor: Redistributor = ctx.redistributor
        grad_out = redistributor.as_dtensor(gradient)
        # The backward is linear in the gradient, so a partial gradient can stay partial on an axis that shards nothing.
        layout: Layout = tuple(
            place if out == R and place.is_partial() else out
            for place, out in zip(grad_out.placements, ctx.output, strict=True)
        )
        local = local_of(redistributor.to_layout(grad_out, layout))
        x, w = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        locals_ = torch.ops.aten.convolution_backward.default(local, x, w, [local.shape[1]], *ctx.options, needed)
        image_layout: Layout = tuple(Partial() if place == Shard(1) else place for place in layout)
        layouts = (image_layout, *(_weight_gradient(layout, shard) for shard in (_channels(ctx.options), Shard(0))))
        shapes = (*ctx.shapes, (gradient.shape[1],))
        gradients = [
            make_dtensor(local.contiguous(), redistributor.device_mesh, layout, shape, contiguous_stride(shape))
            if is_needed
            else None
            for local, layout, shape, is_needed in zip(locals_, layouts, shapes, needed, strict=True)
        ]
        return (*gradients, None, None, None)


def _weight_gradient(layout: Layout, channels: Shard) -> Layout:
    """Return the layout of a weight's gradient from that of the output's; ``channels``: shard of its channels."""
    return tuple(Partial() if place == Shard(0) else channels if place == Shard(1) else place for place in layout)
