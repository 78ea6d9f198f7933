"""Constraints of zigzag token order on layouts: all attention shards the sequence on the same mesh axis, or none does.

Tokens are in zigzag order (`planner.plan.token_order`) in all blocks or in none. The sequences of all attention are
therefore sharded on one common axis, or unsharded. The sequences of the model's inputs are unsharded, so that they can
be reordered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cost_model.layouts.layout import sharded_dim, split_factor
from planner.graph.op_graph import OpGraph
from planner.ilp.problem import Edge
from planner.regions.regions import Region, RegionGraph, is_received
from planner.strategies import context_parallel
from planner.strategies.enumerate import Strategy
from planner.strategies.token_dims import LOSSES

NOT_SPLIT = -1
"""Stands for an axis where attention has unsharded sequences."""


def zigzag_length(graph: OpGraph) -> int | None:
    """Return the tokens per sequence of attention with ``is_zigzag``; None if no attention has it."""
    return next((graph.values[op.inputs[0]].shape[2] for op in graph.ops if op.is_zigzag), None)


def zigzag_axes(graph: OpGraph, mesh_shape: Sequence[int]) -> tuple[int | None, ...]:
    """Return the axes on which all stages of a pipeline together can shard their sequences, including `NOT_SPLIT`.

    ``(None,)`` if the stages need not agree, because no sequence is in zigzag order.
    """
    if zigzag_length(graph) is None:
        return (None,)
    return (NOT_SPLIT, *(axis for axis, size in enumerate(mesh_shape) if size > 1))


def has_zigzag_attention(region: Region) -> bool:
    """Return whether a region has attention on sequences that may be in zigzag order."""
    return any(region_op.op.is_zigzag for region_op in region.ops)


def sequence_axes(region: Region, strategy: Strategy, mesh_shape: Sequence[int]) -> set[int]:
    """Return the axes on which sequences of zigzag attention are sharded; `NOT_SPLIT` for unsharded sequences."""
    axes = set()
    for region_op in region.ops:
        if region_op.op.is_zigzag:
            layouts = [strategy.forward[i] for i in region_op.inputs]
            axis = context_parallel.split_axis(region_op.op, layouts, mesh_shape)
            axes.add(NOT_SPLIT if axis is None else axis)
    return axes


def allows_zigzag(region: Region, strategy: Strategy, length: int, mesh_shape: Sequence[int]) -> bool:
    """Return whether sequences of ``length`` may be in zigzag order under ``strategy``.

    There are three conditions. The model's inputs are not sharded along the sequence. Labels that a loss reads are
    unsharded, or sharded into whole samples. All attention of the region shards its sequences on the same axis.
    """
    for slot, layout in zip(region.slots, strategy.forward, strict=True):
        is_model_input = slot.origin == "entry" and slot.source is None and slot.value.kind == "input"
        if not is_model_input or is_received(slot) or slot.value.shape[1:2] != (length,) or layout is None:
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
    """Yield edges of the integer program that make the attention of all region classes use the same axis.

    Args:
        regions: a representative of each class.
        strategies: the strategies of each class.
    """
    previous: tuple[int, tuple[int, ...]] | None = None
    for node, (region, choices) in enumerate(zip(regions, strategies, strict=True)):
        if not has_zigzag_attention(region):
            continue
        axes = tuple(next(iter(sequence_axes(region, strategy, mesh_shape))) for strategy in choices)
        if previous is not None:
            producer, producer_axes = previous
            yield Edge(
                producer=producer,
                consumer=node,
                producer_ports=producer_axes,
                consumer_ports=axes,
                pairs={(axis, axis): {} for axis in dict.fromkeys(axes) if axis in producer_axes},
            )
        previous = node, axes


def zigzag_axis(regions: RegionGraph, strategies: Sequence[Strategy], mesh_shape: Sequence[int]) -> int | None:
    """Return the axis on which sequences are in zigzag order, given each class's strategy; None if unsharded."""
    for region_class, strategy in zip(regions.classes, strategies, strict=True):
        region = regions.regions[region_class.members[0]]
        for axis in sequence_axes(region, strategy, mesh_shape) - {NOT_SPLIT}:
            return axis
    return None
