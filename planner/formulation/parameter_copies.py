"""The uses of a parameter that one redistributed copy serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.ilp.problem import Edge, same_port
from planner.liveness.parameter_classes import ParameterClass
from planner.liveness.structure import Structure
from planner.pricing.port_layouts import PortNumbers, producer_port
from planner.strategies.enumerate import Strategy


def same_layout_edges(
    parameters: Sequence[ParameterClass], ports: PortNumbers, strategies: Sequence[tuple[Strategy, ...]]
) -> Iterator[Edge]:
    """Yield edges on which the uses of parameters under one name need the same layouts.

    Args:
        parameters: the parameter classes.
        ports: numbers of layouts.
        strategies: the strategies of each region class.
    """
    for (index, slot), (other, other_slot) in dict.fromkeys(pair for each in parameters for pair in each.same_layout):
        shown = tuple(ports.number(producer_port(s, slot)) for s in strategies[index])
        other_shown = tuple(ports.number(producer_port(s, other_slot)) for s in strategies[other])
        yield same_port(index, shown, other, other_shown, ports.agree)


def is_saved(structure: Structure, uses: Sequence[tuple[int, int]]) -> bool:
    """Return whether autograd saves a parameter for the backward of any of its ``uses`` (region class, slot)."""
    saved = structure.profile.ops
    for index, slot in uses:
        region = structure.representative(index)
        root = structure.profile.root[region.slots[slot].value.name]
        if any(root in saved[region_op.op.name].saved for region_op in region.ops):
            return True
    return False
