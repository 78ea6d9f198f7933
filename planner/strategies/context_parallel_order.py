"""What an even order of sequences (`planner.plan.token_order`) asks of layouts: one axis for all of attention.

Tokens that are in that order for one block are so for all. So attention is split along the sequence on one axis in
every block, or in none; and what the model is called with comes whole along its sequences, to be brought in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cost_model.layouts.layout import sharded_dim, split_factor
from planner.graph.op_graph import OpGraph
from planner.ilp.problem import Edge
from planner.regions.regions import Region, RegionGraph, is_received
from planner.strategies import context_parallel
from planner.strategies.enumerate import Strategy
from planner.strategies.token_reordering import LOSSES

NOT_SPLIT = -1
"""In place of an axis, where attention has whole sequences."""


def zigzag_length(graph: OpGraph) -> int | None:
    """Return the length of sequences that are in an even order where they are split; None: none are."""
    return next((graph.values[op.inputs[0]].shape[2] for op in graph.ops if op.is_zigzag), None)


def zigzag_axes(graph: OpGraph, mesh_shape: Sequence[int]) -> tuple[int | None, ...]:
    """Return the axes on which all stages of a pipeline may have attention's sequences split, `NOT_SPLIT` among them.

    None alone where each may do as it likes, because sequences are in their own order.
    """
    if zigzag_length(graph) is None:
        return (None,)
    return (NOT_SPLIT, *(axis for axis, size in enumerate(mesh_shape) if size > 1))


def has_zigzag_attention(region: Region) -> bool:
    """Tell whether a region has attention that is handed sequences in an even order."""
    return any(region_op.op.is_zigzag for region_op in region.ops)


def sequence_axes(region: Region, strategy: Strategy, mesh_shape: Sequence[int]) -> set[int]:
    """Return the axes on which the sequence of such attention is split, `NOT_SPLIT` for whole ones."""
    found = set()
    for region_op in region.ops:
        if region_op.op.is_zigzag:
            layouts = [strategy.forward[i] for i in region_op.inputs]
            axis = context_parallel.split_axis(region_op.op, layouts, mesh_shape)
            found.add(NOT_SPLIT if axis is None else axis)
    return found


def allows_zigzag(region: Region, strategy: Strategy, length: int, mesh_shape: Sequence[int]) -> bool:
    """Tell whether sequences of ``length`` may be in an even order under a strategy.

    They are whole where the model is called with them, and so are labels where a loss reads them, split by samples at
    most; a region's attention is all split on the same axis.
    """
    for slot, layout in zip(region.slots, strategy.forward, strict=True):
        given = slot.origin == "entry" and slot.source is None and slot.value.kind == "input"
        if not given or is_received(slot) or slot.value.shape[1:2] != (length,) or layout is None:
            continue
        if any(sharded_dim(place) == 1 and size > 1 for place, size in zip(layout, mesh_shape, strict=True)):
            return False
    for region_op in region.ops:
        if region_op.op.target_name in LOSSES:
            labels = region_op.inputs[1]
            layout, rows = strategy.forward[labels], region.slots[labels].value.shape[0]
            if layout is not None and rows % (length * split_factor(layout, mesh_shape)):
                return False
    return len(sequence_axes(region, strategy, mesh_shape)) <= 1


def zigzag_edges(
    regions: Sequence[Region], strategies: Sequence[Sequence[Strategy]], mesh_shape: Sequence[int]
) -> Iterator[Edge]:
    """Yield edges that hold the attention of all classes to one axis.

    Args:
        regions: one of each class.
        strategies: the choices of each.
    """
    before: tuple[int, tuple[int, ...]] | None = None
    for node, (region, choices) in enumerate(zip(regions, strategies, strict=True)):
        if not has_zigzag_attention(region):
            continue
        axes = tuple(next(iter(sequence_axes(region, strategy, mesh_shape))) for strategy in choices)
        if before is not None:
            producer, ports = before
            yield Edge(
                producer=producer,
                consumer=node,
                producer_ports=ports,
                consumer_ports=axes,
                pairs={(axis, axis): {} for axis in dict.fromkeys(axes) if axis in ports},
            )
        before = node, axes


def zigzag_axis(regions: RegionGraph, strategies: Sequence[Strategy], mesh_shape: Sequence[int]) -> int | None:
    """Return the axis on which sequences are in an even order under a decision; None: on none."""
    for members, strategy in zip(regions.classes, strategies, strict=True):
        for axis in sequence_axes(regions.regions[members.members[0]], strategy, mesh_shape) - {NOT_SPLIT}:
            return axis
    return None
