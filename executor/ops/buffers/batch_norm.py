"""Batch normalization with channels, or the dims that it averages over, sharded on any axes.

The statistics are those of the whole batch, as in torch's ``SyncBatchNorm``. With N values of each channel on all ranks
together, xhat = (x - mean) / sqrt(var + eps), and g the gradient of the output,

    dx = weight / sqrt(var + eps) * (g - sum(g) / N - xhat * sum(g * xhat) / N)

An axis that shards the batch or a spatial dim all-gathers the means and variances of its ranks in the forward, and
all-reduces the two sums in the backward. Shards are even, so that the whole mean is the mean of the ranks' means, and
the whole variance the mean of their variances plus the variance of their means. An axis that shards the channels
all-gathers the running statistics that it has updated: buffers are whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout, format_layout
from executor.ops.lookups.embedding import split_offset
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import all_gather, local_of, make_dtensor, run_function
from planner.errors import PlanLayoutError

CHANNELS = Shard(1)


def batch_norm(
    redistributor: Redistributor,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Return ``input`` [batch, channels, ...] normalized, in its layout; arguments as in ``F.batch_norm``.

    Raises:
        PlanLayoutError: ``input`` is partial, weight or bias are not sharded as the channels are, or the running
            statistics are DTensors.
        ValueError: training on one value per channel.
    """
    x = redistributor.as_dtensor(input)
    layout = tuple(x.placements)
    channels: Layout = tuple(Shard(0) if place == CHANNELS else Replicate() for place in layout)
    affine = [None if value is None else redistributor.as_dtensor(value) for value in (weight, bias)]
    running = [value for value in (running_mean, running_var) if value is not None]
    if (
        any(place.is_partial() for place in layout)
        or any(value is not None and tuple(value.placements) != channels for value in affine)
        or any(isinstance(value, DTensor) for value in running)
    ):
        raise PlanLayoutError(
            f"batch_norm got an input of shape {tuple(x.shape)} in the layout ({', '.join(format_layout(layout))}), "
            f"with weight and bias that are not all in ({', '.join(format_layout(channels))}).",
            field="input_plan",
            what_to_do="Shard weight and bias on dim 0 where the input is sharded on dim 1; replicate them elsewhere.",
        )
    first, length = split_offset(redistributor, x.shape[1], channels, 0)
    # Of split channels copies: torch's kernel saves the statistics, and then the whole buffers are written.
    shards = [value if length == len(value) else value.narrow(0, first, length).clone() for value in running]
    batch_axes = [
        axis
        for axis, place in enumerate(layout)
        if place not in (Replicate(), CHANNELS) and redistributor.axis_size(axis) > 1
    ]
    if training and batch_axes:
        result = _synchronized(redistributor, x, affine, shards, batch_axes, momentum, eps)
    else:
        result = _on_each_rank(redistributor, x, affine, shards, training, momentum, eps)
    if training:
        _gather_channels(redistributor, running, shards, channels)
    return result


def batch_norm_op(
    redistributor: Redistributor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    """Return ``batch_norm``; arguments as in ``torch.batch_norm``, whose order differs."""
    return batch_norm(redistributor, input, running_mean, running_var, weight, bias, training, momentum, eps)


def instance_norm(
    redistributor: Redistributor,
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Return the result of ``F.instance_norm`` on a replicated input, if it updates running statistics.

    The result is NotImplemented if it updates none.

    Raises:
        PlanLayoutError: an input or a parameter is not replicated.
    """
    if running_mean is None or not use_input_stats:
        return NotImplemented
    tensors = [None if value is None else redistributor.as_dtensor(value) for value in (input, weight, bias)]
    for tensor in tensors:
        if tensor is not None and tuple(tensor.placements) != redistributor.replicated:
            raise PlanLayoutError(
                "instance_norm updates running statistics, but its input or a parameter is in the layout "
                f"({', '.join(format_layout(tuple(tensor.placements)))}).",
                field="input_plan",
                what_to_do="Replicate the input and the parameters, or use track_running_stats=False.",
            )
    x, w, b = (None if value is None else value.to_local() for value in tensors)
    assert x is not None
    result = F.instance_norm(x, running_mean, running_var, w, b, use_input_stats, momentum, eps)
    return redistributor.as_dtensor(result)


def _on_each_rank(
    redistributor: Redistributor,
    x: DTensor,
    affine: list[DTensor | None],
    running: list[torch.Tensor],
    training: bool,
    momentum: float,
    eps: float,
) -> DTensor:
    """Return the result of torch's own kernel on local tensors: no statistics of other ranks are needed."""
    layout = tuple(x.placements)
    parameter_gradients = tuple(_parameter_gradient(place) for place in layout)
    weight, bias = (None if value is None else value.to_local(grad_placements=parameter_gradients) for value in affine)
    mean, var = running or (None, None)
    local = x.to_local(grad_placements=layout)
    if mean is not None and mean.dtype != local.dtype:
        # Beside statistics in full precision, torch's kernels need the parameters in full precision too.
        weight, bias = (None if value is None else value.to(mean.dtype) for value in (weight, bias))
    result = F.batch_norm(local, mean, var, weight, bias, training, momentum, eps)
    return DTensor.from_local(
        result,
        redistributor.device_mesh,
        layout,
        run_check=False,
        shape=x.shape,
        stride=contiguous_stride(x.shape),
        grad_placements=layout,
    )


def _parameter_gradient(place: Placement) -> Placement:
    """Return the placement of the gradients of weight and bias, where the input is placed so."""
    if place == CHANNELS:
        return Shard(0)
    return Replicate() if place == Replicate() else Partial()


def _synchronized(
    redistributor: Redistributor,
    x: DTensor,
    affine: list[DTensor | None],
    running: list[torch.Tensor],
    batch_axes: list[int],
    momentum: float,
    eps: float,
) -> DTensor:
    """Return the result with the statistics of all ranks of ``batch_axes``, and update this rank's ``running``."""
    count = x.numel() // x.shape[1]
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    mean, var = _statistics(redistributor, local_of(x), batch_axes)
    if running:
        with torch.no_grad():
            for buffer, value in zip(running, (mean, var * (count / (count - 1))), strict=True):
                buffer.lerp_(value.to(buffer.dtype), momentum)
    result: DTensor = run_function(_Normalize, x, *affine, mean, (var + eps).rsqrt(), redistributor, batch_axes)
    return result


def _statistics(
    redistributor: Redistributor, local: torch.Tensor, batch_axes: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and biased variance [channels] over the batch and spatial dims of all ranks of ``batch_axes``."""
    dims = [0, *range(2, local.dim())]
    with torch.no_grad():
        var, mean = torch.var_mean(_in_full_precision(local), dims, correction=0)
        for axis in batch_axes:
            group = redistributor.device_mesh.get_group(axis)
            of_ranks = all_gather(torch.stack([mean, var]).unsqueeze(0), 0, group)
            var_of_means, mean = torch.var_mean(of_ranks[:, 0], 0, correction=0)
            var = of_ranks[:, 1].mean(0) + var_of_means
    return mean, var


class _Normalize(torch.autograd.Function):
    """Normalization by given statistics, whose gradients are part of the backward. ``x`` is [batch, channels, ...]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: DTensor,
        weight: DTensor | None,
        bias: DTensor | None,
        mean: torch.Tensor,
        invstd: torch.Tensor,
        redistributor: Redistributor,
        batch_axes: list[int],
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        local = local_of(x)
        w = None if weight is None else local_of(weight)
        ctx.save_for_backward(local, w, mean, invstd)
        ctx.redistributor, ctx.batch_axes = redistributor, batch_axes
        ctx.layout, ctx.shape = tuple(x.placements), tuple(x.shape)
        ctx.dtypes = [None if value is None else value.dtype for value in (weight, bias)]
        result = (_in_full_precision(local) - _along(mean, local)) * _along(invstd, local)
        if w is not None:
            result = result * _along(w, local)
        if bias is not None:
            result = result + _along(local_of(bias), local)
        return make_dtensor(
            result.to(local.dtype), redistributor.device_mesh, ctx.layout, ctx.shape, contiguous_stride(ctx.shape)
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 7
        redistributor: Redistributor = ctx.redistributor
        arriving = redistributor.to_layout(redistributor.as_dtensor(gradient), ctx.layout)
        x, weight, mean, invstd = ctx.saved_tensors
        g = _in_full_precision(local_of(arriving))
        xhat = (_in_full_precision(x) - _along(mean, x)) * _along(invstd, x)
        dims = [0, *range(2, x.dim())]
        own_sums = torch.stack([g.sum(dims), (g * xhat).sum(dims)])
        sums = own_sums
        for axis in ctx.batch_axes:
            sums = redistributor.all_reduce(sums, "sum", axis)
        means = sums / (torch.Size(ctx.shape).numel() // ctx.shape[1])
        scale = invstd if weight is None else invstd * weight
        dx = _along(scale, x) * (g - _along(means[0], x) - xhat * _along(means[1], x))
        mesh, stride = redistributor.device_mesh, contiguous_stride(ctx.shape)
        layout = tuple(_parameter_gradient(place) for place in ctx.layout)

        of_parameters = (
            None if dtype is None else make_dtensor(local.to(dtype), mesh, layout, (ctx.shape[1],), (1,))
            for dtype, local in zip(ctx.dtypes, own_sums.flip(0), strict=True)
        )
        return make_dtensor(dx.to(x.dtype), mesh, ctx.layout, ctx.shape, stride), *of_parameters, *(None,) * 4


def _gather_channels(
    redistributor: Redistributor, running: list[torch.Tensor], shards: list[torch.Tensor], channels: Layout
) -> None:
    """Write the updated ``shards`` of all ranks to the whole buffers ``running``, both [channels]."""
    axes = [axis for axis, place in enumerate(channels) if place == Shard(0) and redistributor.axis_size(axis) > 1]
    if not (axes and running):
        return
    values = torch.stack(shards)
    for axis in reversed(axes):
        values = all_gather(values, 1, redistributor.device_mesh.get_group(axis))
    for buffer, value in zip(running, values, strict=True):
        buffer.copy_(value)


def _along(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``values`` [channels], in full precision, so that they broadcast along dim 1 of ``like``."""
    return _in_full_precision(values).view(1, -1, *(1,) * (like.dim() - 2))


def _in_full_precision(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
