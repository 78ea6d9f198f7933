"""Two-dim convolution with the batch, or the output channels, split on any axes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals import local_of, make_dtensor, run_function

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

    On each axis either nothing is split, or the batch, or the output channels (of one group). NotImplemented elsewhere.
    """
    images, kernel = redistributor.as_dtensor(input), redistributor.as_dtensor(weight)
    offset = None if bias is None else redistributor.as_dtensor(bias)
    if images.dim() != 4 or padding == "same":
        return NotImplemented
    output = _output_layout(images, kernel, offset, groups)
    if output is None:
        return NotImplemented
    # torch takes a number for a pair, and "valid" for no padding.
    pad = 0 if padding == "valid" else padding
    sizes = tuple((value, value) if isinstance(value, int) else tuple(value) for value in (stride, pad, dilation))
    return run_function(_Convolution, images, kernel, offset, redistributor, output, (*sizes, groups))


def _output_layout(images: DTensor, kernel: DTensor, offset: DTensor | None, groups: int) -> Layout | None:
    output: list[Placement] = []
    for axis, (x, w) in enumerate(zip(images.placements, kernel.placements, strict=True)):
        b = w if offset is None else offset.placements[axis]
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
    @staticmethod
    def forward(
        ctx: Any,
        images: DTensor,
        kernel: DTensor,
        offset: DTensor | None,
        redistributor: Redistributor,
        output: Layout,
        sizes: tuple[Any, ...],
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        x, w = local_of(images), local_of(kernel)
        found = F.conv2d(x, w, None if offset is None else local_of(offset), *sizes)
        ctx.save_for_backward(x, w)
        ctx.redistributor, ctx.output, ctx.sizes = redistributor, output, sizes
        ctx.shapes = tuple(images.shape), tuple(kernel.shape)
        shape = (images.shape[0], kernel.shape[0], *found.shape[2:])
        return make_dtensor(found.contiguous(), redistributor.device_mesh, output, shape, contiguous_stride(shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 6
        redistributor: Redistributor = ctx.redistributor
        arrived = redistributor.as_dtensor(gradient)
        # The convolution is linear: on an axis where nothing is split, what is partial may stay so.
        wanted: Layout = tuple(
            came if out == R and came.is_partial() else out
            for came, out in zip(arrived.placements, ctx.output, strict=True)
        )
        local = local_of(redistributor.to_layout(arrived, wanted))
        x, w = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.sizes
        needed = list(ctx.needs_input_grad[:3])
        found = torch.ops.aten.convolution_backward.default(
            local, x, w, [w.shape[0]], stride, padding, dilation, False, [0, 0], groups, needed
        )
        image_layout: Layout = tuple(Partial() if place == Shard(1) else place for place in wanted)
        weight_layout: Layout = tuple(
            Partial() if place == Shard(0) else Shard(0) if place == Shard(1) else place for place in wanted
        )
        layouts = (image_layout, weight_layout, weight_layout)
        shapes = (*ctx.shapes, ctx.shapes[1][:1])
        gradients = [
            make_dtensor(piece.contiguous(), redistributor.device_mesh, layout, shape, contiguous_stride(shape))
            if need
            else None
            for piece, layout, shape, need in zip(found, layouts, shapes, needed, strict=True)
        ]
        return (*gradients, None, None, None)
