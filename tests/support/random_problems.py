"""Small random problems with every kind of quantity, for hypothesis."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import strategies as st

from planner.ilp.problem import Edge, Node, Problem, SharedCharge
from planner.ilp.quantities import (
    BACKWARD,
    EXPOSED,
    FORWARD,
    PASSES,
    Charge,
    Lifetime,
    live,
    persistent,
    transient,
)

TIMES = (
    FORWARD.compute,
    BACKWARD.compute,
    FORWARD.slowdown,
    BACKWARD.slowdown,
    EXPOSED,
    *(
        quantities[link]
        for quantities in (
            *(FORWARD.blocking, BACKWARD.blocking, FORWARD.prefetch),
            *(BACKWARD.prefetch, FORWARD.once, BACKWARD.once),
        )
        for link in ("inside-node", "between-nodes")
    ),
)
BYTES = (
    persistent("parameters"),
    persistent("activations"),
    transient(0),
    transient(1),
    live("0", "activations"),
    live("0", "transient"),
    live("1", "activations"),
    Lifetime.of({live("0", "activations"): 1, live("1", "activations"): 3}),
    Lifetime.of({live("1", "activations"): 2, live("1", "transient"): 1, live("2", "gradients"): 0.5}),
)


@dataclass(frozen=True)
class Scale:
    """What one unit of time and one of memory are, so that problems come in sizes from toy devices to large ones."""

    time_s: float
    nbytes: float


SCALES = (Scale(1e-7, 1e3), Scale(1e-5, 1e6), Scale(1e-2, 1e9))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A problem of up to 4 nodes of 4 choices, with parallel edges, self-edges, and charges shared by several edges."""
    scale = draw(st.sampled_from(SCALES))

    def charge(most: int) -> Charge:
        amounts = draw(st.dictionaries(st.sampled_from(TIMES + BYTES), st.integers(0, 20), max_size=most))
        return {q: n * (scale.time_s if q in TIMES else scale.nbytes) for q, n in amounts.items()}

    nodes = [
        Node(name=f"n{i}", charges=tuple(charge(4) for _ in range(draw(st.integers(1, 4)))))
        for i in range(draw(st.integers(1, 4)))
    ]
    edges = []
    for _ in range(draw(st.integers(0, 5))):
        producer, consumer = (draw(st.integers(0, len(nodes) - 1)) for _ in range(2))
        sides = [[draw(st.integers(0, 2)) for _ in nodes[end].charges] for end in (producer, consumer)]
        possible = sorted(set(itertools.product(*sides)))
        absent = draw(st.sets(st.sampled_from(possible), max_size=len(possible) // 2))
        pairs = {pair: charge(2) for pair in possible if pair not in absent}
        edges.append(
            Edge(
                producer=producer,
                consumer=consumer,
                producer_ports=tuple(sides[0]),
                consumer_ports=tuple(sides[1]),
                pairs=pairs,
            )
        )
    members = [(e, p, q) for e, edge in enumerate(edges) for p, q in edge.pairs]
    shared_charges = []
    for _ in range(draw(st.integers(0, 4)) if members else 0):
        chosen = draw(st.lists(st.sampled_from(members), min_size=1, max_size=4, unique=True))
        shared_charges.append(SharedCharge(charge=charge(3), members=tuple(chosen)))
    constant = {**charge(2), PASSES: float(draw(st.sampled_from([1, 2, 8])))}
    return Problem(nodes=tuple(nodes), edges=tuple(edges), shared_charges=tuple(shared_charges), constant=constant)
