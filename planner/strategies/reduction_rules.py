"""Rules of reductions to one number or over the first dim, and of losses, which users mostly average over the batch.

DTensor leaves the mean of a split tensor as an average over ranks, which nothing after it can read, and has no rule for
several losses. The executor reduces the result at once (``executor.ops.reductions``): what follows has it whole. Sums
over other dims than the first, such as those of a norm over features, are left to DTensor: few plans split those dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout, sharded_dim
from planner.graph.op_graph import Op, Value
from planner.strategies.axis_rule import AxisRule, InnerCollective

R = Replicate()

_TOTALS = frozenset({"aten.sum.default", "aten.mean.default"})

_OVER_DIMS = frozenset({"aten.sum.dim_IntList", "aten.mean.dim"})

_ELEMENTWISE = frozenset(
    f"aten.{name}.default"
    for name in (
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "soft_margin_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
    )
)
"""Losses that reduce a number for each element."""

_OF_CLASSES = frozenset({"aten.cross_entropy_loss.default", "aten.nll_loss_nd.default"})
"""Losses that reduce a number for each row, of which some may be ignored or weighted."""

NAMES = _TOTALS | _OVER_DIMS | _ELEMENTWISE | {"aten.nll_loss_nd.default"}
"""Ops whose rules are all here; those of the cross entropy that splits its classes are in `own_rules`."""

_NONE = 0  # torch's number of the reduction "none"


def reduction_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule] | None:
    """Return the rules of an op in `NAMES`, or of a cross entropy that splits its rows alone.

    None: all is plain, or DTensor runs the op, which reduces other dims than the first.
    """
    if all(value.kind == "plain" for value in inputs):
        return None
    if op.target_name in _OVER_DIMS:
        return _rules_over_dims(op, inputs[0])
    is_total = op.target_name in _TOTALS
    shape = inputs[0].shape
    splits = range(len(shape))
    if op.target_name in _OF_CLASSES:
        splits = range(int(len(shape) > 1))  # of one dim, it is that of the classes
    weights = [value for index, value in enumerate(inputs) if not _has_rows(op, inputs, index)]
    if weights:  # of the last dims, or of the classes
        is_split = not any(value.requires_grad or _has_batch(value.shape, shape) for value in weights)
        splits = splits[:1] if is_split else range(0)
    rules = [_rule(op, inputs, R, R, R)]
    if is_total:
        rules += [_rule(op, inputs, R, Partial(), Partial()), _rule(op, inputs, Partial(), R, R)]
    for dim in splits:
        split = Shard(dim)
        arriving = split if _reduction(op) == _NONE else R
        rules.append(_rule(op, inputs, split, arriving, split))
        if is_total:
            rules.append(_rule(op, inputs, split, Partial(), split))
    return rules


def _rules_over_dims(op: Op, value: Value) -> list[AxisRule] | None:
    kept = kept_dims(op, value)
    if kept.get(0, 0) is not None:
        return None

    def rule(place: Placement, result: Placement, arriving: Placement, gradient: Placement) -> AxisRule:
        return AxisRule(
            inputs=(place,),
            outputs=(result,),
            output_gradients=(arriving,),
            input_gradients=(gradient if value.requires_grad else None,),
        )

    rules = [rule(R, R, R, R), rule(R, R, Partial(), Partial()), rule(Partial(), R, R, R)]
    for dim, to in kept.items():
        result = R if to is None else Shard(to)
        rules.append(rule(Shard(dim), result, result, Shard(dim)))
        if to is None:  # as where the mean is taken off the samples; the gradient is reduced in the backward
            rules.append(rule(Shard(dim), R, Partial(), Shard(dim)))
    return rules


def kept_dims(op: Op, value: Value) -> dict[int, int | None]:
    """Return dim of the tensor that ``op`` reduces over some dims -> dim of the result; None: it is reduced."""
    count = len(value.shape)
    given = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
    keeps = op.args[2] if len(op.args) > 2 else op.kwargs.get("keepdim", False)
    reduced = {dim % count for dim in given} if given and count else set(range(count))
    left = [dim for dim in range(count) if dim not in reduced]
    return {dim: None if dim in reduced else (dim if keeps else left.index(dim)) for dim in range(count)}


def _rule(op: Op, inputs: Sequence[Value], placement: Placement, arriving: Placement, gradient: Placement) -> AxisRule:
    """Return the rule in which the inputs with a row for each of the first one's are in ``placement``."""
    is_none = _reduction(op) == _NONE

    def place(value: Value, index: int) -> Placement | None:
        if value.kind == "plain":
            return None
        return placement if _has_rows(op, inputs, index) else R

    return AxisRule(
        inputs=tuple(place(value, index) for index, value in enumerate(inputs)),
        outputs=(placement if is_none else R,),
        output_gradients=(arriving,),
        input_gradients=tuple(gradient if value.requires_grad else None for value in inputs),
    )


def _has_rows(op: Op, inputs: Sequence[Value], index: int) -> bool:
    """Return whether an input has a row for each row of the first: all but the weights of classes."""
    if op.target_name in _OF_CLASSES:
        return index < 2
    return inputs[index].shape == inputs[0].shape


def _has_batch(shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Return whether a tensor that broadcasts to the shape ``of`` has more than one row along its first dim."""
    return len(shape) == len(of) and bool(of) and shape[0] > 1


def _reduction(op: Op) -> int | None:
    """Return torch's number of the op's reduction; None: the op has no such argument."""
    for position, argument in enumerate(op.target._schema.arguments):
        if argument.name == "reduction":
            given = op.args[position] if position < len(op.args) else op.kwargs.get("reduction", argument.default_value)
            return int(given)
    return None


def reduction_collectives(
    op: Op,
    inputs: Sequence[Value],
    layouts: Sequence[Layout | None],
    mesh_shape: Sequence[int],
    arriving: Layout | None,
) -> tuple[InnerCollective, ...]:
    """Return the all-reduces of the result over each axis that splits what is reduced, or has a partial sum of it.

    Where the gradient of the result arrives as a partial sum, it is reduced in the backward.
    """
    layout = next((layout for layout in layouts if layout is not None), None)
    if layout is None or _reduction(op) == _NONE:
        return ()
    value, kept = inputs[0], dict[int, int | None]()
    if op.target_name in _OVER_DIMS:
        kept = kept_dims(op, value)
        if kept.get(0, 0) is not None:
            return ()
    axes = [axis for axis, size in enumerate(mesh_shape) if size > 1 and layout[axis] != R]
    still_split = [axis for axis in axes if kept.get(sharded_dim(layout[axis]) or 0) is not None]
    numel = math.prod(value.shape[dim] for dim, to in kept.items() if to is not None)
    numel //= math.prod(mesh_shape[axis] for axis in still_split)
    dtype = op.kwargs.get("dtype") or (value.dtype if value.dtype.is_floating_point else torch.int64)
    # The loss of classes is reduced together with the number, or the weight, of its rows.
    nbytes = 2 * max(dtype.itemsize, 4) if op.target_name in _OF_CLASSES else numel * dtype.itemsize
    reduced = [axis for axis in axes if axis not in still_split]
    backward = [axis for axis in reduced if arriving is not None and arriving[axis].is_partial()]
    return (
        *(InnerCollective(kind="all_reduce", axis=axis, nbytes=nbytes) for axis in reduced),
        *(InnerCollective(kind="all_reduce", axis=axis, nbytes=nbytes, phase="backward") for axis in backward),
    )
