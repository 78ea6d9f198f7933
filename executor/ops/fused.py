"""Norm, gated activation, rotation and loss as one op each on local pieces: `fused_kernels` as they run.

Nothing is communicated but by the loss, which reduces as `executor.ops.cross_entropy` does. On a GPU each formula is
compiled (``torch.compile``, at its first call) to one kernel that reads its inputs and writes its results; elsewhere it
runs step by step. The backward has formulas of its own, so that only inputs are kept, and a number for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout, format_layout
from executor.ops.embedding import split_offset
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals import compiled, local_of, make_dtensor, run_function
from planner.errors import PlanLayoutError
from planner.model_rewrites import fused_kernels
from planner.model_rewrites.fuse_ops import FusedOps, fuse_ops

R, P = Replicate(), Partial()


def replace_chains(module: nn.Module, redistributor: Redistributor, *, opaque: Collection[nn.Module] = ()) -> None:
    """Make whatever can be fused in ``module`` run as one op; ``opaque`` are the modules that Sharders made."""

    def of(name: str, op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any) -> torch.Tensor:
            if any(isinstance(value, DTensor) for value in args):
                return op(redistributor, *args)
            # A rank's own tensor, as behind a module that returns one: no other rank is known to have it.
            return fused_kernels.run_forward(name, args)[0]

        return call

    ops = FusedOps(
        rms_norm=of(fused_kernels.RMS_NORM, rms_norm),
        gated=of(fused_kernels.GATED, gated),
        gated_pairs=of(fused_kernels.GATED_PAIRS, gated_pairs),
        rotary=of(fused_kernels.ROTARY, rotary),
        cross_entropy=of(fused_kernels.CROSS_ENTROPY, fused_cross_entropy),
    )
    fuse_ops(module, ops, opaque=opaque)


def rms_norm(redistributor: Redistributor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> DTensor:
    """Return the norm of ``x``, in its layout, which splits any dim but the last; ``weight`` is replicated.

    Raises:
        PlanLayoutError: other layouts.
    """
    given = [redistributor.as_dtensor(tensor) for tensor in (x, weight)]
    _check_layout("a norm", given[0], range(given[0].dim() - 1))
    _check_layout("a norm's weight", given[1], ())
    found: DTensor = run_function(_RmsNorm, *given, redistributor, eps)
    return found


def gated(redistributor: Redistributor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> DTensor:
    """Return ``activation(gate) * up``, which have one layout, in it.

    Raises:
        PlanLayoutError: they have two, or sums that are not taken yet.
    """
    given = [redistributor.as_dtensor(tensor) for tensor in (gate, up)]
    _check_layout("a gated activation", given[0], range(given[0].dim()))
    if given[0].placements != given[1].placements:
        raise _wrong("a gated activation's second factor", given[1])
    found: DTensor = run_function(_Gated, *given, redistributor, activation)
    return found


def gated_pairs(redistributor: Redistributor, pairs: torch.Tensor, activation: str) -> DTensor:
    """Return ``activation(gate) * up`` of ``pairs``, in which each gate precedes its up along the last dim.

    Raises:
        PlanLayoutError: sums are not taken yet, or a pair is cut.
    """
    given = redistributor.as_dtensor(pairs)
    _check_layout("a gated activation", given, range(given.dim()))
    if local_of(given).shape[-1] % 2:
        raise _wrong("a gated activation of pairs", given)
    found: DTensor = run_function(_GatedPairs, given, redistributor, activation)
    return found


def rotary(redistributor: Redistributor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> DTensor:
    """Return ``x`` [batch, heads, seq, width] turned, in its layout; ``cos`` and ``sin`` are sliced where it is split.

    Raises:
        PlanLayoutError: the width is split, or sums are not taken yet.
    """
    given = redistributor.as_dtensor(x)
    _check_layout("a rotation", given, range(3))
    angles = tuple(_angle_placement(placement, cos.shape[0]) for placement in given.placements)
    turned = [
        local_of(redistributor.to_layout(redistributor.as_dtensor(tensor.detach()), angles)) for tensor in (cos, sin)
    ]
    found: DTensor = run_function(_Rotary, given, *turned, redistributor)
    return found


def fused_cross_entropy(
    redistributor: Redistributor, logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, mean: bool
) -> DTensor:
    """Return the loss, in float32 and replicated, of ``logits`` [rows, classes] and class indices ``labels`` [rows].

    Raises:
        PlanLayoutError: the logits hold sums that are not taken yet.
    """
    given = redistributor.as_dtensor(logits)
    _check_layout("a loss", given, range(2))
    rows = tuple(placement if placement == Shard(0) else R for placement in given.placements)
    held = redistributor.labels(labels, rows)
    found: DTensor = run_function(_CrossEntropy, given, held, redistributor, ignore_index, mean)
    return found


def _check_layout(what: str, tensor: DTensor, dims: Sequence[int]) -> None:
    """Refuse a layout that does more than split ``dims``."""
    if any(placement != R and placement not in [Shard(dim) for dim in dims] for placement in tensor.placements):
        raise _wrong(what, tensor)


def _wrong(what: str, tensor: DTensor) -> PlanLayoutError:
    layout = ", ".join(format_layout(tuple(tensor.placements)))
    return PlanLayoutError(
        f"{what} got a tensor of shape {tuple(tensor.shape)} in the layout ({layout}).",
        field="input_plan",
        what_to_do="Replicate it, or split dims along which the op does not sum, alike in all that it computes with.",
    )


def _angle_placement(placement: Placement, samples: int) -> Placement:
    """Return how cosines and sines [samples or 1, seq, width] go with a tensor so placed."""
    if placement == Shard(0):
        return Shard(0) if samples > 1 else R
    return Shard(1) if placement == Shard(2) else R


def _run(formula: Callable[..., Any], *args: Any) -> Any:
    """Return a formula's result: compiled on a GPU."""
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
    return compiled(formula)(*args) if on_gpu else formula(*args)


def _arrived(redistributor: Redistributor, gradient: torch.Tensor, output: Layout) -> DTensor:
    """Return a result's gradient as the ops take it: split as the result is, or sums that each rank has a part of."""
    came = redistributor.as_dtensor(gradient)
    wanted = tuple(
        there if place == R and there.is_partial() else place
        for there, place in zip(came.placements, output, strict=True)
    )
    return redistributor.to_layout(came, wanted)


def _like(local: torch.Tensor, tensor: DTensor) -> DTensor:
    """Return the tensor whose piece is ``local``, with the layout, shape and order of dims of ``tensor``."""
    return make_dtensor(local, tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())


class _RmsNorm(torch.autograd.Function):
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
        arrived = _arrived(ctx.redistributor, gradient, ctx.layout)
        of_x, of_weight = _run(fused_kernels.rms_norm_backward, local_of(arrived), *ctx.saved_tensors)
        summed = tuple(R if placement == R else P for placement in arrived.placements)
        mesh, width = ctx.redistributor.device_mesh, ctx.shape[-1:]
        x_gradient = make_dtensor(
            of_x.contiguous(), mesh, tuple(arrived.placements), ctx.shape, contiguous_stride(ctx.shape)
        )
        return x_gradient, make_dtensor(of_weight, mesh, summed, width, (1,)), None, None


class _Gated(torch.autograd.Function):
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
        arrived = _arrived(ctx.redistributor, gradient, ctx.layout)
        found = _run(fused_kernels.gated_backward, local_of(arrived), *ctx.saved_tensors, ctx.activation)
        of_gate, of_up = (_like(local, arrived) for local in found)
        return of_gate, of_up, None, None


class _GatedPairs(torch.autograd.Function):
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
        arrived = _arrived(ctx.redistributor, gradient, ctx.layout)
        found = _run(fused_kernels.gated_pairs_backward, local_of(arrived), *ctx.saved_tensors, ctx.activation)
        stride = contiguous_stride(ctx.shape)
        mesh = ctx.redistributor.device_mesh
        return make_dtensor(found.contiguous(), mesh, tuple(arrived.placements), ctx.shape, stride), None, None


class _Rotary(torch.autograd.Function):
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
        arrived = _arrived(ctx.redistributor, gradient, ctx.layout)
        return (
            _like(_run(fused_kernels.rotary_backward, local_of(arrived), *ctx.saved_tensors), arrived),
            None,
            None,
            None,
        )


class _CrossEntropy(torch.autograd.Function):
    """Shapes below are this rank's: logits [n, c], all others [n]."""

    @staticmethod
    def forward(
        ctx: Any, logits: DTensor, labels: torch.Tensor, redistributor: Redistributor, ignored: int, mean: bool
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        layout, x = tuple(logits.placements), local_of(logits)
        first, _ = split_offset(redistributor, logits.shape[1], layout, 1)
        by_class = [axis for axis, placement in enumerate(layout) if placement == Shard(1)]
        maxima = _run(fused_kernels.row_maxima, x)
        for axis in by_class:
            maxima = redistributor.all_reduce(maxima, "max", axis)
        sums = _run(fused_kernels.row_sums, x, labels - first, maxima)
        for axis in by_class:
            sums = redistributor.all_reduce(sums, "sum", axis)
        log_sums, counted = sums[0].log() + maxima, labels != ignored
        losses = (log_sums - sums[1]).masked_fill(~counted, 0)
        totals = torch.stack([losses.sum(), counted.sum().to(losses.dtype)])
        for axis, placement in enumerate(layout):
            if placement == Shard(0):
                totals = redistributor.all_reduce(totals, "sum", axis)
        # A mean over no label is 0 / 0, as in torch.
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
        arrived = redistributor.to_layout(redistributor.as_dtensor(gradient), redistributor.replicated)
        logits, labels, log_sums, count = ctx.saved_tensors
        scales = (local_of(arrived).to(torch.float32) / count) * (labels != ctx.ignored)
        found = _run(fused_kernels.logits_gradient, logits, labels - ctx.first, log_sums, scales)
        stride = contiguous_stride(ctx.shape)
        made = make_dtensor(found, redistributor.device_mesh, ctx.layout, ctx.shape, stride)
        return made, None, None, None, None
