"""Fused ops on local tensors: RMS norm, gated activation, rotary embedding and cross entropy, one kernel each.

Only the loss communicates; it reduces as ``executor.ops.cross_entropy`` does. The formulas are those of
``planner.model_rewrites.fused_kernels``. On a GPU ``torch.compile`` compiles each formula, at its first call, to one
kernel that reads its inputs and writes its results. Elsewhere a formula runs op by op. The backward has formulas of its
own, so that autograd saves only inputs and one number per row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout, format_layout
from executor.ops.lookups.embedding import split_offset
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import compiled, local_of, make_dtensor, run_function
from planner.errors import PlanLayoutError
from planner.model_rewrites import fused_kernels
from planner.model_rewrites.fuse_ops import FusedOps, fuse_ops

R, P = Replicate(), Partial()


def replace_with_fused_ops(
    module: nn.Module, redistributor: Redistributor, *, opaque: Collection[nn.Module] = ()
) -> None:
    """Make ``module`` run each chain of ops that can be fused as one op.

    Args:
        module: the root module, changed in place.
        redistributor: redistributes on the mesh.
        opaque: submodules that stay unchanged: those that Sharders returned.
    """

    def fused(name: str, op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any) -> torch.Tensor:
            if any(isinstance(value, DTensor) for value in args):
                return op(redistributor, *args)
            # Plain tensors have no layout. They come, for example, from a module in return_local_tensor.
            return fused_kernels.run_forward(name, args)[0]

        return call

    ops = FusedOps(
        rms_norm=fused(fused_kernels.RMS_NORM, rms_norm),
        gated=fused(fused_kernels.GATED, gated),
        gated_pairs=fused(fused_kernels.GATED_PAIRS, gated_pairs),
        rotary=fused(fused_kernels.ROTARY, rotary),
        cross_entropy=fused(fused_kernels.CROSS_ENTROPY, fused_cross_entropy),
    )
    fuse_ops(module, ops, opaque=opaque)


def rms_norm(redistributor: Redistributor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> DTensor:
    """Return the RMS norm of ``x`` over its last dim, in the layout of ``x``.

    Args:
        redistributor: redistributes on the mesh.
        x: its layout may shard any dim but the last.
        weight: a replicated tensor [width].
        eps: number added to the mean square.

    Raises:
        PlanLayoutError: an input has another layout.
    """
    inputs = [redistributor.as_dtensor(tensor) for tensor in (x, weight)]
    _check_layout("a norm", inputs[0], range(inputs[0].dim() - 1))
    _check_layout("a norm's weight", inputs[1], ())
    result: DTensor = run_function(_RmsNorm, *inputs, redistributor, eps)
    return result


def gated(redistributor: Redistributor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> DTensor:
    """Return ``activation(gate) * up``, in the layout of ``gate`` and ``up``.

    Raises:
        PlanLayoutError: ``gate`` and ``up`` have different layouts, or partial ones.
    """
    inputs = [redistributor.as_dtensor(tensor) for tensor in (gate, up)]
    _check_layout("a gated activation", inputs[0], range(inputs[0].dim()))
    if inputs[0].placements != inputs[1].placements:
        raise _wrong_layout("a gated activation's second factor", inputs[1])
    result: DTensor = run_function(_Gated, *inputs, redistributor, activation)
    return result


def gated_pairs(redistributor: Redistributor, pairs: torch.Tensor, activation: str) -> DTensor:
    """Return ``activation(gate) * up`` of ``pairs``, whose last dim is gate, up, gate, up and so on.

    Raises:
        PlanLayoutError: the layout is partial, or puts a gate and its up on two ranks.
    """
    dtensor = redistributor.as_dtensor(pairs)
    _check_layout("a gated activation", dtensor, range(dtensor.dim()))
    if local_of(dtensor).shape[-1] % 2:
        raise _wrong_layout("a gated activation of pairs", dtensor)
    result: DTensor = run_function(_GatedPairs, dtensor, redistributor, activation)
    return result


def rotary(redistributor: Redistributor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> DTensor:
    """Return ``x`` [batch, heads, seq, width] with rotary position embedding, in the layout of ``x``.

    Args:
        redistributor: redistributes on the mesh.
        x: its layout may shard any dim but the width.
        cos: [samples or 1, seq, width]; redistributed to the shard that matches that of ``x``.
        sin: the same shape as ``cos``, and redistributed in the same way.

    Raises:
        PlanLayoutError: ``x`` has another layout.
    """
    dtensor = redistributor.as_dtensor(x)
    _check_layout("a rotary embedding", dtensor, range(3))
    layout = tuple(_angle_placement(placement, cos.shape[0]) for placement in dtensor.placements)
    angles = [
        local_of(redistributor.to_layout(redistributor.as_dtensor(tensor.detach()), layout)) for tensor in (cos, sin)
    ]
    result: DTensor = run_function(_Rotary, dtensor, *angles, redistributor)
    return result


def fused_cross_entropy(
    redistributor: Redistributor, logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, mean: bool
) -> DTensor:
    """Return the loss, in float32 and replicated, of ``logits`` [rows, classes] and class indices ``labels`` [rows].

    Raises:
        PlanLayoutError: the logits are partial.
    """
    dtensor = redistributor.as_dtensor(logits)
    _check_layout("a loss", dtensor, range(2))
    rows = tuple(placement if placement == Shard(0) else R for placement in dtensor.placements)
    local_labels = redistributor.labels(labels, rows)
    result: DTensor = run_function(_CrossEntropy, dtensor, local_labels, redistributor, ignore_index, mean)
    return result


def _check_layout(what: str, tensor: DTensor, dims: Sequence[int]) -> None:
    """Raise ``PlanLayoutError`` if the layout of ``tensor`` does anything but replicate or shard ``dims``."""
    if any(placement != R and placement not in [Shard(dim) for dim in dims] for placement in tensor.placements):
        raise _wrong_layout(what, tensor)


def _wrong_layout(what: str, tensor: DTensor) -> PlanLayoutError:
    layout = ", ".join(format_layout(tuple(tensor.placements)))
    return PlanLayoutError(
        f"{what} got a tensor of shape {tuple(tensor.shape)} in the layout ({layout}).",
        field="input_plan",
        what_to_do="Replicate it, or shard dims that the op does not reduce, in the same layout for all its inputs.",
    )


def _angle_placement(placement: Placement, samples: int) -> Placement:
    """Return the placement of cos and sin [samples or 1, seq, width] for an ``x`` with ``placement``."""
    if placement == Shard(0):
        return Shard(0) if samples > 1 else R
    return Shard(1) if placement == Shard(2) else R


def _run(formula: Callable[..., Any], *args: Any) -> Any:
    """Return ``formula(*args)``; on a GPU the formula is compiled."""
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
    return compiled(formula)(*args) if on_gpu else formula(*args)


def _grad_out(redistributor: Redistributor, gradient: torch.Tensor, output: Layout) -> DTensor:
    """Return a result's gradient in the layout ``output``; where ``output`` replicates, a partial one stays partial."""
    dtensor = redistributor.as_dtensor(gradient)
    layout = tuple(
        place if out == R and place.is_partial() else out for place, out in zip(dtensor.placements, output, strict=True)
    )
    return redistributor.to_layout(dtensor, layout)


def _like(local: torch.Tensor, tensor: DTensor) -> DTensor:
    """Return the DTensor of ``local`` with the layout, shape and strides of ``tensor``."""
    return make_dtensor(local, tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())


class _RmsNorm(torch.autograd.Function):
    """RMS norm in autograd. It saves ``x``, the weight and one scale per row."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, weight: DTensor, redistributor: Redistributor, eps: float) -> DTensor:
        ctx.set_materialize_grads(False)
        result, scale = _run(fused_kernels.rms_norm_forward, local_of(x), local_of(weight), eps)
        ctx.save_for_backward(local_of(x), local_of(weight), scale)
        ctx.redistributor, ctx.layout, ctx.shape = redistributor, tuple(x.placements), tuple(x.shape)
        stride = contiguous_stride(x.shape)
        return make_dtensor(result.contiguous(), redistributor.device_mesh, ctx.layout, x.shape, stride)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 4
        grad_out = _grad_out(ctx.redistributor, gradient, ctx.layout)
        grad_x, grad_weight = _run(fused_kernels.rms_norm_backward, local_of(grad_out), *ctx.saved_tensors)
        weight_layout = tuple(R if placement == R else P for placement in grad_out.placements)
        mesh, width = ctx.redistributor.device_mesh, ctx.shape[-1:]
        grad_input = make_dtensor(
            grad_x.contiguous(), mesh, tuple(grad_out.placements), ctx.shape, contiguous_stride(ctx.shape)
        )
        return grad_input, make_dtensor(grad_weight, mesh, weight_layout, width, (1,)), None, None


class _Gated(torch.autograd.Function):
    """Gated activation in autograd. It saves ``gate`` and ``up``."""

    @staticmethod
    def forward(ctx: Any, gate: DTensor, up: DTensor, redistributor: Redistributor, activation: str) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(local_of(gate), local_of(up))
        ctx.redistributor, ctx.layout, ctx.activation = redistributor, tuple(gate.placements), activation
        return _like(_run(fused_kernels.gated_forward, local_of(gate), local_of(up), activation), gate)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 4
        grad_out = _grad_out(ctx.redistributor, gradient, ctx.layout)
        locals_ = _run(fused_kernels.gated_backward, local_of(grad_out), *ctx.saved_tensors, ctx.activation)
        grad_gate, grad_up = (_like(local, grad_out) for local in locals_)
        return grad_gate, grad_up, None, None


class _GatedPairs(torch.autograd.Function):
    """Gated activation of pairs in autograd. It saves ``pairs``."""

    @staticmethod
    def forward(ctx: Any, pairs: DTensor, redistributor: Redistributor, activation: str) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(local_of(pairs))
        ctx.redistributor, ctx.layout, ctx.activation = redistributor, tuple(pairs.placements), activation
        ctx.shape, shape = tuple(pairs.shape), (*pairs.shape[:-1], pairs.shape[-1] // 2)
        result = _run(fused_kernels.gated_pairs_forward, local_of(pairs), activation)
        return make_dtensor(result.contiguous(), redistributor.device_mesh, ctx.layout, shape, contiguous_stride(shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 3
        grad_out = _grad_out(ctx.redistributor, gradient, ctx.layout)
        local = _run(fused_kernels.gated_pairs_backward, local_of(grad_out), *ctx.saved_tensors, ctx.activation)
        stride = contiguous_stride(ctx.shape)
        mesh = ctx.redistributor.device_mesh
        return make_dtensor(local.contiguous(), mesh, tuple(grad_out.placements), ctx.shape, stride), None, None


class _Rotary(torch.autograd.Function):
    """Rotary embedding in autograd. It saves the local ``cos`` and ``sin``."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, cos: torch.Tensor, sin: torch.Tensor, redistributor: Redistributor) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.redistributor, ctx.layout = redistributor, tuple(x.placements)
        return _like(_run(fused_kernels.rotary_forward, local_of(x), cos, sin), x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 4
        grad_out = _grad_out(ctx.redistributor, gradient, ctx.layout)
        local = _run(fused_kernels.rotary_backward, local_of(grad_out), *ctx.saved_tensors)
        return _like(local, grad_out), None, None, None


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy in autograd. Local shapes: logits [n, c], labels and numbers per row [n]."""

    @staticmethod
    def forward(
        ctx: Any, logits: DTensor, labels: torch.Tensor, redistributor: Redistributor, ignored: int, mean: bool
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        layout, x = tuple(logits.placements), local_of(logits)
        first, _ = split_offset(redistributor, logits.shape[1], layout, 1)
        class_axes = [axis for axis, placement in enumerate(layout) if placement == Shard(1)]
        maxima = _run(fused_kernels.row_maxima, x)
        for axis in class_axes:
            maxima = redistributor.all_reduce(maxima, "max", axis)
        sums = _run(fused_kernels.row_sums, x, labels - first, maxima)
        for axis in class_axes:
            sums = redistributor.all_reduce(sums, "sum", axis)
        log_sums, label_mask = sums[0].log() + maxima, labels != ignored
        losses = (log_sums - sums[1]).masked_fill(~label_mask, 0)
        totals = torch.stack([losses.sum(), label_mask.sum().to(losses.dtype)])
        for axis, placement in enumerate(layout):
            if placement == Shard(0):
                totals = redistributor.all_reduce(totals, "sum", axis)
        # The mean over no label is 0 / 0, as in torch.
        count = totals[1] if mean else torch.ones_like(totals[1])
        ctx.save_for_backward(x, labels, log_sums, count)
        ctx.redistributor, ctx.first, ctx.ignored = redistributor, first, ignored
        ctx.layout, ctx.shape = layout, tuple(logits.shape)
        return make_dtensor(totals[0] / count, redistributor.device_mesh, redistributor.replicated, (), ())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        redistributor: Redistributor = ctx.redistributor
        grad_loss = redistributor.to_layout(redistributor.as_dtensor(gradient), redistributor.replicated)
        logits, labels, log_sums, count = ctx.saved_tensors
        scales = (local_of(grad_loss).to(torch.float32) / count) * (labels != ctx.ignored)
        local = _run(fused_kernels.logits_gradient, logits, labels - ctx.first, log_sums, scales)
        stride = contiguous_stride(ctx.shape)
        grad_logits = make_dtensor(local, redistributor.device_mesh, ctx.layout, ctx.shape, stride)
        return grad_logits, None, None, None, None
