"""The ops of a model that DTensor cannot run in any layout: ranks run them on local tensors, or nothing does."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Replicate

from planner.errors import UnsupportedOpError
from planner.regions.regions import Region, RegionGraph, RegionOp, find_op_inputs
from planner.run.model_analysis import ModelAnalysis
from planner.strategies.axis_strategies import AxisRules
from planner.strategies.dtensor_rules import is_unruled_in_place_view, quiet_dtensor
from planner.strategies.enumerate import StrategyTable
from planner.strategies.local_ops import ALWAYS_LOCAL, can_be_local, packet_name, with_local_ops

_SIZE = 2
"""Ranks of the axis on which ops are tried. What is replicated runs alike on any number of ranks."""

R = Replicate()


def with_local_ops_marked(model: ModelAnalysis, table: StrategyTable) -> ModelAnalysis:
    """Return ``model`` with those ops marked as local that DTensor does not run, but each rank can run by itself."""
    for find in (_always_local, _without_rule):  # in this order: DTensor is slow on some that are always local
        names = find(model.base, table)
        model = model.with_graph(with_local_ops(model.graph, names), model.lists) if names else model
    return model


def _always_local(regions: RegionGraph, table: StrategyTable) -> frozenset[str]:
    return ALWAYS_LOCAL.intersection(map(packet_name, regions.graph.ops))


def _without_rule(regions: RegionGraph, table: StrategyTable) -> frozenset[str]:
    found: set[str] = set()
    with quiet_dtensor():
        rules = table.axis_rules(_SIZE)
        for region_class in regions.classes:
            region = regions.regions[region_class.members[0]]
            if not table.runs_replicated(region):
                found |= {
                    packet_name(region_op.op)
                    for region_op in region.ops
                    if _failing_pass(region, region_op, rules) and can_be_local(region_op.op)
                }
    return frozenset(found)


def unsupported_ops(regions: RegionGraph, table: StrategyTable) -> UnsupportedOpError | None:
    """Return the error that names every op that cannot be run; None where all ops can be run on replicated tensors.

    Args:
        regions: the regions of the model at its base batch.
        table: the strategies of regions.
    """
    with quiet_dtensor():
        rules = table.axis_rules(_SIZE)
        found: dict[tuple[str, str, str], None] = {}
        for region_class in regions.classes:
            region = regions.regions[region_class.members[0]]
            if not table.runs_replicated(region):
                found.update((each, None) for each in _unsupported(region, region_class.pattern, rules))
            else:
                views = (region_op for region_op in region.ops if _is_unruled_view(region, region_op))
                found.update(((view.op.target_name, region_class.pattern, "forward"), None) for view in views)
    return UnsupportedOpError(tuple(found)) if found else None


def _unsupported(region: Region, pattern: str, rules: AxisRules) -> Iterator[tuple[str, str, str]]:
    """Yield (op, FQN pattern of its module, "forward" or "backward") for each op of ``region`` that cannot be run."""
    alone = [(region_op, _failing_pass(region, region_op, rules)) for region_op in region.ops]
    failing = [(region_op.op.target_name, pattern, direction) for region_op, direction in alone if direction]
    # Where each op runs by itself, they fail together.
    yield from failing or [(region_op.op.target_name, pattern, "with the ops next to it") for region_op in region.ops]


def _is_unruled_view(region: Region, region_op: RegionOp) -> bool:
    """Return whether an op changes a DTensor to a view of it, and DTensor has no rule for that."""
    is_plain = not region_op.inputs or region.slots[region_op.inputs[0]].origin == "plain"
    return not is_plain and is_unruled_in_place_view(region_op.op.target)


def _failing_pass(region: Region, region_op: RegionOp, rules: AxisRules) -> str | None:
    """Return the pass in which an op fails on replicated tensors, "forward" or "backward"; None if it runs."""
    inputs = find_op_inputs(region, region_op)
    placements = tuple(None if region.slots[i].origin == "plain" else R for i in region_op.inputs)
    if _is_unruled_view(region, region_op):
        return "forward"
    outputs = rules.forward(region_op.op, inputs, placements)
    if outputs is None or any(placement != R for placement in outputs):
        return "forward"
    gradients = tuple(R if region.slots[i].value.requires_grad else None for i in region_op.outputs)
    if any(gradients) and rules.backward(region_op.op, inputs, placements, gradients) is None:
        return "backward"
    return None
