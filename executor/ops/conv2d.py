"""Two-dimensional convolution with the batch, or the output channels, sharded on any axes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function

R = Replicate()


def conv2d(
    redistributor: Redistributor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Any:
    """Return the convolution of ``input`` [batch, channels, height, width]; arguments as in torch.

    A mesh axis may shard nothing, the batch, or the output channels (with ``groups=1``). The result is NotImplemented
    for all other layouts, for ``padding="same"``, and for an input without a batch dim.
    """
    images, kernel = redistributor.as_dtensor(input), redistributor.as_dtensor(weight)
    bias = None if bias is None else redistributor.as_dtensor(bias)
    if images.dim() != 4 or padding == "same":
        return NotImplemented
    output = _output_layout(images, kernel, bias, groups)
    if output is None:
        return NotImplemented
    # torch accepts one number for a pair, and "valid" for no padding.
    padding = 0 if padding == "valid" else padding
    pairs = tuple((value, value) if isinstance(value, int) else tuple(value) for value in (stride, padding, dilation))
    return run_function(_Convolution, images, kernel, bias, redistributor, output, (*pairs, groups))


def _output_layout(images: DTensor, kernel: DTensor, bias: DTensor | None, groups: int) -> Layout | None:
    """Return the layout of the output; None where the layouts of the inputs are not covered."""
    output: list[Placement] = []
    for axis, (x, w) in enumerate(zip(images.placements, kernel.placements, strict=True)):
        b = w if bias is None else bias.placements[axis]
        if (x, w, b) == (R, R, R):
            output.append(R)
        elif (x, w, b) == (Shard(0), R, R):
            output.append(Shard(0))
        elif (x, w, b) == (R, Shard(0), Shard(0)) and groups == 1:
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
        result = F.conv2d(x, w, None if bias is None else local_of(bias), *options)
        ctx.save_for_backward(x, w)
        ctx.redistributor, ctx.output, ctx.options = redistributor, output, options
        ctx.shapes = tuple(images.shape), tuple(kernel.shape)
        shape = (images.shape[0], kernel.shape[0], *result.shape[2:])
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
        stride, padding, dilation, groups = ctx.options
        needed = list(ctx.needs_input_grad[:3])
        locals_ = torch.ops.aten.convolution_backward.default(
            local, x, w, [w.shape[0]], stride, padding, dilation, False, [0, 0], groups, needed
        )
        image_layout: Layout = tuple(Partial() if place == Shard(1) else place for place in layout)
        weight_layout: Layout = tuple(
            Partial() if place == Shard(0) else Shard(0) if place == Shard(1) else place for place in layout
        )
        layouts = (image_layout, weight_layout, weight_layout)
        shapes = (*ctx.shapes, ctx.shapes[1][:1])
        gradients = [
            make_dtensor(local.contiguous(), redistributor.device_mesh, layout, shape, contiguous_stride(shape))
            if is_needed
            else None
            for local, layout, shape, is_needed in zip(locals_, layouts, shapes, needed, strict=True)
        ]
        return (*gradients, None, None, None)
