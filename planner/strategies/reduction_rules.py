"""Rules of reductions to one number, and of losses, which users mostly average over the batch.

DTensor leaves the mean of a split tensor as an average over ranks, which nothing after it can read, and has no rule for
several losses. The executor reduces the number at once (``executor.ops.reductions``): what follows has it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout
from planner.graph.op_graph import Op, Value
from planner.strategies.axis_rule import AxisRule, InnerCollective

R = Replicate()

_TOTALS = frozenset({"aten.sum.default", "aten.mean.default"})

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

NAMES = _TOTALS | _ELEMENTWISE | {"aten.nll_loss_nd.default"}
"""Ops whose rules are all here; those of the cross entropy that splits its classes are in `own_rules`."""

_NONE = 0  # torch's number of the reduction "none"


def reduction_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule] | None:
    """Return the rules of an op in `NAMES`, or of a cross entropy that splits its rows alone; None: all is plain."""
    if all(value.kind == "plain" for value in inputs):
        return None
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
    return rules


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
    op: Op, inputs: Sequence[Value], layouts: Sequence[Layout | None], mesh_shape: Sequence[int]
) -> tuple[InnerCollective, ...]:
    """Return the all-reduces of a number over each axis that splits the first input, or a partial one."""
    layout = next((layout for layout in layouts if layout is not None), None)
    if layout is None or _reduction(op) == _NONE:
        return ()
    # The loss of classes is reduced together with the number, or the weight, of its rows.
    dtype = op.kwargs.get("dtype") or (inputs[0].dtype if inputs[0].dtype.is_floating_point else torch.int64)
    itemsize = dtype.itemsize
    nbytes = 2 * max(itemsize, 4) if op.target_name in _OF_CLASSES else itemsize
    return tuple(
        InnerCollective(kind="all_reduce", axis=axis, nbytes=nbytes)
        for axis, (place, size) in enumerate(zip(layout, mesh_shape, strict=True))
        if size > 1 and place != R
    )
