"""`inner_collectives`: the collectives inside the executor's own ops; and one device's share of an op."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Shard

from cost_model.layouts.layout import Layout, replicated, split_factor
from cost_model.layouts.uneven import Rounded, piece_shape
from planner.graph.op_graph import Op, Value, writes_plain
from planner.model_rewrites import fused_kernels, opaque_op
from planner.model_rewrites.experts import experts_op
from planner.strategies import buffer_updates, context_parallel, expert_parallel, reduction_rules
from planner.strategies.axis_rule import InnerCollective
from planner.strategies.local_ops import opaque_collectives
from planner.strategies.matmul_rules import PRODUCTS, product_collectives, product_rules
from planner.strategies.own_rules import is_shardable_cross_entropy


def inner_collectives(
    op: Op,
    inputs: Sequence[Value],
    layouts: Sequence[Layout | None],
    mesh_shape: Sequence[int],
    arriving: Layout | None = None,
) -> tuple[InnerCollective, ...]:
    """Return the collectives inside ``op`` with inputs in ``layouts``; none for an op that DTensor runs.

    Args:
        op: the op.
        inputs: its inputs.
        layouts: layouts of the inputs.
        mesh_shape: sizes of the mesh's axes.
        arriving: layout in which the gradient of its first result arrives; None: there is none.
    """
    name = op.target_name
    if name == context_parallel.OP_NAME:
        return context_parallel.collectives(op, inputs, layouts, _shapes(inputs, layouts, mesh_shape), mesh_shape)
    if name == experts_op.OP_NAME:
        return expert_parallel.collectives(op, inputs, layouts, _shapes(inputs, layouts, mesh_shape), mesh_shape)
    if name == opaque_op.OP_NAME:
        return opaque_collectives(op, layouts, mesh_shape)
    if name in PRODUCTS and product_rules(op, inputs) is not None:
        return product_collectives(inputs, layouts, mesh_shape)
    if writes_plain(op, inputs):
        return buffer_updates.write_collectives(inputs, layouts, _shapes(inputs, layouts, mesh_shape), mesh_shape)
    if name == buffer_updates.BATCH_NORM:
        return buffer_updates.batch_norm_collectives(op, inputs, layouts, mesh_shape)
    losses = ("aten.cross_entropy_loss.default", fused_kernels.CROSS_ENTROPY)
    if name in losses and is_shardable_cross_entropy(op, inputs):
        return _cross_entropy_collectives(inputs, layouts, mesh_shape)
    if name in reduction_rules.NAMES or name in losses:
        return reduction_rules.reduction_collectives(op, inputs, layouts, mesh_shape, arriving)
    return ()


def _shapes(
    inputs: Sequence[Value], layouts: Sequence[Layout | None], mesh_shape: Sequence[int]
) -> list[tuple[int, ...]]:
    return [shard_shape(value, layout, mesh_shape) for value, layout in zip(inputs, layouts, strict=True)]


def _cross_entropy_collectives(
    inputs: Sequence[Value], layouts: Sequence[Layout | None], mesh_shape: Sequence[int]
) -> tuple[InnerCollective, ...]:
    """Return the all-reduces of a loss, in float32.

    An axis that shards the classes has two all-reduces: one for the rows' maxima, one for the rows' exponential sums
    and target logits together. An axis that shards the rows has one all-reduce, for the sum of losses and the number of
    labels.
    """
    layout = layouts[0]
    assert layout is not None
    axes = [axis for axis, size in enumerate(mesh_shape) if size > 1]
    rows = inputs[0].shape[0]
    for axis in axes:
        if layout[axis] == Shard(0):
            rows //= mesh_shape[axis]
    class_axes = [axis for axis in axes if layout[axis] == Shard(1)]
    row_axes = [axis for axis in axes if layout[axis] == Shard(0)]
    return (
        *(InnerCollective(kind="all_reduce", axis=axis, nbytes=4 * rows) for axis in class_axes),
        *(InnerCollective(kind="all_reduce", axis=axis, nbytes=8 * rows) for axis in class_axes),
        *(InnerCollective(kind="all_reduce", axis=axis, nbytes=8) for axis in row_axes),
    )


def shard_shape(
    value: Value, layout: Layout | None, mesh_shape: Sequence[int], rounded: Rounded | None = None
) -> tuple[int, ...]:
    """Return the shape of one device's shard of ``value``; a plain value (layout None) is unsharded.

    Args:
        value: the tensor.
        layout: its layout.
        mesh_shape: sizes of the mesh axes.
        rounded: lengths of dims that are rounded up (`OpGraph.rounded`); the result has their true pieces.
    """
    layout = replicated(len(mesh_shape)) if layout is None else layout
    return piece_shape(value.shape, layout, mesh_shape, rounded or {})


def work_split(layouts: Sequence[Layout | None], mesh_shape: Sequence[int]) -> int:
    """Return the number of ranks that share an op's work: the product of the sizes of axes that shard any tensor.

    Args:
        layouts: layouts of the op's inputs and outputs.
    """
    ranks = 1
    for axis, size in enumerate(mesh_shape):
        on_axis = [(layout[axis],) for layout in layouts if layout is not None]
        if any(split_factor(layout, (size,)) > 1 for layout in on_axis):
            ranks *= size
    return ranks
