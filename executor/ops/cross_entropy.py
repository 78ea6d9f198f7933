"""Cross entropy of logits [rows, classes] that are sharded by rows, by classes, or both, on any axes.

DTensor's own op is wrong if ranks ignore different numbers of labels, because it averages the means of the ranks. It
also all-gathers sharded classes. Here, with m the row's maximum and t the row's target logit,

    loss = sum over rows that are not ignored of (log(sum over classes of exp(x - m)) + m - t)

divided by the number of these rows if the loss is a mean. Each reduction over a sharded dim is an all-reduce: of the
maxima, then of the sum of exponentials and t of each row together, then of losses and counts. The backward pass,
(softmax - onehot) / count, needs no communication.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from cost_model.layouts.layout import Layout, format_layout
from executor.ops.lookups.embedding import split_offset
from executor.ops.reductions import loss_of_classes
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function
from planner.errors import PlanLayoutError


def cross_entropy(
    redistributor: Redistributor,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return the loss, replicated, of ``input`` [rows, classes] and indices ``target`` [rows]; arguments as in torch.

    With options that this op does not cover, rows alone may be split (`loss_of_classes`). The result is NotImplemented
    for them if the logits are replicated and the plan has no zigzag order.

    Raises:
        PlanLayoutError: options that are not covered, with sharded or partial logits or a zigzag order.
    """
    logits = redistributor.as_dtensor(input)
    layout = tuple(logits.placements)
    covered = (
        (weight, size_average, reduce) == (None, None, None)
        and not label_smoothing
        and reduction in ("mean", "sum")
        and logits.dim() == 2
        and not target.is_floating_point()
        and all(placement in (Replicate(), Shard(0), Shard(1)) for placement in layout)
    )
    if not covered:
        options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        result = loss_of_classes(redistributor, F.cross_entropy, input, target, *options)
        if result is not NotImplemented or (layout == redistributor.replicated and redistributor.zigzag is None):
            return result
        raise PlanLayoutError(
            f"cross_entropy got logits of shape {tuple(logits.shape)} in the layout "
            f"({', '.join(format_layout(layout))}), with options that run on whole classes only.",
            field="input_plan",
            what_to_do="Shard classes of logits [rows, classes] alone, with class indices, mean or sum, no weights.",
        )
    rows = tuple(placement if placement == Shard(0) else Replicate() for placement in layout)
    labels = redistributor.labels(target, rows)
    return run_function(_CrossEntropy, logits, labels, redistributor, ignore_index, reduction == "mean")


class _CrossEntropy(torch.autograd.Function):
    """The op in autograd. Local shapes: logits ``x`` [n, c], labels and numbers per row [n]."""

    @staticmethod
    def forward(
        ctx: Any, logits: DTensor, labels: torch.Tensor, redistributor: Redistributor, ignored: int, mean: bool
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        layout = tuple(logits.placements)
        first, classes = split_offset(redistributor, logits.shape[1], layout, 1)
        x = _in_full_precision(local_of(logits))
        label_mask = labels != ignored
        log_sum, target = _row_terms(x, labels - first, classes, layout, redistributor, x.dtype == logits.dtype)
        losses = (log_sum - target).masked_fill(~label_mask, 0)
        totals = torch.stack([losses.sum(), label_mask.sum().to(x.dtype)])
        for axis in _sharding_axes(layout, 0):
            totals = redistributor.all_reduce(totals, "sum", axis)
        # The mean over no label is 0 / 0, as in torch.
        count = totals[1] if mean else torch.ones_like(totals[1])
        ctx.save_for_backward(local_of(logits), labels, log_sum, count)
        ctx.redistributor, ctx.first, ctx.ignored = redistributor, first, ignored
        ctx.layout, ctx.shape = layout, tuple(logits.shape)
        loss = (totals[0] / count).to(logits.dtype)
        return make_dtensor(loss, redistributor.device_mesh, redistributor.replicated, (), ())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, None, None, None, None]:
        if gradient is None:
            return None, None, None, None, None
        redistributor: Redistributor = ctx.redistributor
        grad_loss = redistributor.to_layout(redistributor.as_dtensor(gradient), redistributor.replicated)
        logits, labels, log_sum, count = ctx.saved_tensors
        x = _in_full_precision(logits)
        # In place: logits are often the largest tensor of a step.
        result = x.sub(log_sum.unsqueeze(1)) if x.dtype == logits.dtype else x.sub_(log_sum.unsqueeze(1))
        result.exp_()
        is_here, index = _local_index(labels - ctx.first, x.shape[1])
        result.scatter_add_(1, index.unsqueeze(1), -is_here.to(x.dtype).unsqueeze(1))
        result.masked_fill_((labels == ctx.ignored).unsqueeze(1), 0)
        result = result.mul_(local_of(grad_loss).to(x.dtype) / count).to(logits.dtype)
        stride = contiguous_stride(ctx.shape)
        return make_dtensor(result, redistributor.device_mesh, ctx.layout, ctx.shape, stride), None, None, None, None


def _row_terms(
    x: torch.Tensor, index: torch.Tensor, classes: int, layout: Layout, redistributor: Redistributor, is_saved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log(sum(exp(x))) over all classes of each row, and the target logit of each row, both [n].

    Args:
        x: this rank's logits, [n, c].
        index: index of the target class of each row, counted from this rank's first class, [n].
        classes: number of this rank's classes, c.
        layout: layout of the logits.
        redistributor: runs the all-reduces.
        is_saved: whether ``x`` is needed later; if not, its memory is used.
    """
    maxima = x.amax(1)
    for axis in _sharding_axes(layout, 1):
        maxima = redistributor.all_reduce(maxima, "max", axis)
    is_here, local_index = _local_index(index, classes)
    target = x.gather(1, local_index.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0)
    differences = x.sub(maxima.unsqueeze(1)) if is_saved else x.sub_(maxima.unsqueeze(1))
    sums = torch.stack([differences.exp_().sum(1), target])
    for axis in _sharding_axes(layout, 1):
        sums = redistributor.all_reduce(sums, "sum", axis)
    return sums[0].log() + maxima, sums[1]


def _local_index(index: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each row's target is among this rank's classes, and ``index`` with 0 for all other rows."""
    is_here = (index >= 0) & (index < classes)
    return is_here, index.masked_fill(~is_here, 0)


def _sharding_axes(layout: Layout, dim: int) -> list[int]:
    """Return the axes that shard ``dim``."""
    return [axis for axis, placement in enumerate(layout) if placement == Shard(dim)]


def _in_full_precision(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
