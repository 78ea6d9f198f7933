"""Bytes of the tensors that autograd saves for the backward, each counted once however many regions read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cost_model.layouts.layout import Layout
from planner.graph.op_graph import Value
from planner.ilp.problem import Edge
from planner.ilp.quantities import Charge
from planner.ilp.shared_charges import SharedChargeCollector, pairs_on
from planner.liveness.multiplicity import Multiplicity
from planner.liveness.structure import Structure
from planner.pricing.activation_costs import ActivationPricer
from planner.pricing.port_layouts import PortLayouts


def consumed_value(structure: Structure, multiplicity: Multiplicity) -> Value:
    """Return the tensor of a redistribution, as its consumer reads it."""
    key = structure.edges[multiplicity.edges[0]]
    return structure.representative(key.consumer).slots[key.consumer_slot].value


def saves_producer_layout(source: PortLayouts, target: PortLayouts) -> bool:
    """Return whether autograd saves the tensor in the producer's layout, not a redistributed copy."""
    return source.layout == target.layout or target.reallgather


def charge_saved_tensors(
    structure: Structure, pricer: ActivationPricer, edges: Sequence[Edge], charges: SharedChargeCollector
) -> None:
    """Charge the bytes of activations that are saved for the backward, of their copies in other layouts, and of sums.

    Args:
        structure: the structure of the run.
        pricer: prices of activations in the run.
        edges: the edges of activations.
        charges: collects the charges.
    """
    ports, live_bytes, throughout = pricer.redistribution_pricer.ports, pricer.live_bytes, structure.timeline.throughout
    for multiplicity in structure.saved_tensors:
        value = consumed_value(structure, multiplicity)
        by_layout: dict[Layout, list[tuple[int, int, int]]] = defaultdict(list)
        for p, q, members in pairs_on(edges, multiplicity.edges):
            source, target = ports.port(p), ports.port(q)
            if source.layout is not None and (multiplicity.in_producer_layout or saves_producer_layout(source, target)):
                by_layout[source.layout] += members
        for layout, pairs in by_layout.items():
            charges.add(tuple(pairs), live_bytes(value, layout, multiplicity, throughout).charge)
    for multiplicity in structure.saved_copies:
        value = consumed_value(structure, multiplicity)
        copies: dict[int, Charge] = {}
        for p, q, members in pairs_on(edges, multiplicity.edges):
            source, target = ports.port(p), ports.port(q)
            if target.layout is not None and source.layout != target.layout:
                if q not in copies:
                    copies[q] = live_bytes(
                        value, target.layout, multiplicity, throughout, reallgather=target.reallgather
                    ).charge
                charges.add(members, copies[q])
    for multiplicity in structure.shared_gradients:
        value = consumed_value(structure, multiplicity)
        by_layout = defaultdict(list)
        for p, q, members in pairs_on(edges, multiplicity.edges):
            gradient = ports.port(p).gradient
            if gradient is not None and gradient != ports.port(q).gradient:
                by_layout[gradient] += members
        for layout, pairs in by_layout.items():
            charges.add(tuple(pairs), live_bytes(value, layout, multiplicity, throughout).charge)
