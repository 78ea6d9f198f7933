"""An assignment problem: nodes with choices, edges between nodes, and the charges of both.

An assignment takes one choice for every node. An edge joins two nodes. Every choice of a node has a port (a number) on
the edge, and only some pairs of ports are compatible. A `Charge` is what a choice, or a pair of ports, adds to the
quantities of a step. Step time and peak memory follow from the totals (`planner.ilp.step_cost`). Tensors and layouts do
not appear here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from planner.ilp.quantities import Charge, Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A decision between choices; ``charges[c]`` is the charge of choice ``c``."""

    name: str
    charges: tuple[Charge, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A constraint between the choices of two nodes, which may be the same node.

    Attributes:
        producer, consumer: indices of the nodes.
        producer_ports, consumer_ports: for each choice of the node, its port on this edge.
        pairs: compatible (producer port, consumer port) -> charge of the pair.
    """

    producer: int
    consumer: int
    producer_ports: tuple[int, ...]
    consumer_ports: tuple[int, ...]
    pairs: Mapping[tuple[int, int], Charge]


def same_producer_port(a: Edge, b: Edge, agree: Callable[[int, int], bool]) -> Edge:
    """Return an edge on which the producers of ``a`` and ``b`` need ports that ``agree``."""
    return same_port(a.producer, a.producer_ports, b.producer, b.producer_ports, agree)


def same_consumer_port(a: Edge, b: Edge, agree: Callable[[int, int], bool]) -> Edge:
    """Return an edge on which the consumers of ``a`` and ``b`` need ports that ``agree``."""
    return same_port(a.consumer, a.consumer_ports, b.consumer, b.consumer_ports, agree)


def same_port(
    node: int, ports: tuple[int, ...], other: int, other_ports: tuple[int, ...], agree: Callable[[int, int], bool]
) -> Edge:
    """Return an edge on which two nodes, with a port for each of their choices, need ports that ``agree``."""
    distinct_other_ports = dict.fromkeys(other_ports)
    pairs: dict[tuple[int, int], Charge] = {
        (p, q): {} for p in dict.fromkeys(ports) for q in distinct_other_ports if agree(p, q)
    }
    return Edge(producer=node, consumer=other, producer_ports=ports, consumer_ports=other_ports, pairs=pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCharge:
    """A charge that is paid once if any of ``members`` (edge, producer port, consumer port) is chosen."""

    charge: Charge
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The problem: one choice per node, compatible ports on every edge, the least step time within the memory cap.

    Attributes:
        constant: the charge of every assignment.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    shared_charges: tuple[SharedCharge, ...]
    constant: Charge = field(default_factory=dict)


Assignment = Sequence[int]
"""For each node, the index of its choice."""


class InfeasibleAssignmentError(ValueError):
    """An assignment with two incompatible ports on an edge."""


def edge_pair(edge: Edge, assignment: Assignment) -> tuple[int, int]:
    """Return the (producer port, consumer port) that ``assignment`` selects on ``edge``."""
    return edge.producer_ports[assignment[edge.producer]], edge.consumer_ports[assignment[edge.consumer]]


def totals(problem: Problem, assignment: Assignment) -> dict[Quantity, float]:
    """Return seconds and bytes of a step by quantity under ``assignment``.

    Raises:
        InfeasibleAssignmentError: an edge has incompatible ports.
    """
    total: dict[Quantity, float] = defaultdict(float)

    def add(charge: Charge) -> None:
        for quantity, amount in charge.items():
            total[quantity] += amount

    add(problem.constant)
    for node, choice in zip(problem.nodes, assignment, strict=True):
        add(node.charges[choice])
    chosen_pairs = []
    for edge in problem.edges:
        pair = edge_pair(edge, assignment)
        if pair not in edge.pairs:
            raise InfeasibleAssignmentError(
                f"the ports of {problem.nodes[edge.producer].name} and {problem.nodes[edge.consumer].name} cannot meet"
            )
        add(edge.pairs[pair])
        chosen_pairs.append(pair)
    for shared in problem.shared_charges:
        if any(chosen_pairs[edge] == (p, q) for edge, p, q in shared.members):
            add(shared.charge)
    return dict(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solver's assignment.

    Attributes:
        assignment: for each node, the index of its choice.
        objective_s: step time of the assignment, in seconds.
        bound_s: lower bound on the step time of every assignment, in seconds.
        status: "optimal": within the relative gap that was allowed; "limit": a limit of time or nodes came first.
        time_s: seconds of solving the program.
        root_s: objective of the root relaxation, in seconds; None: it was not solved.
    """

    assignment: tuple[int, ...]
    objective_s: float
    bound_s: float
    status: str
    time_s: float
    root_s: float | None = None

    @property
    def hit_limit(self) -> bool:
        """Whether a limit of time or nodes came before the proof of optimality."""
        return self.status == "limit"
