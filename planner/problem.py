"""The choice to be made, as numbers: choices of nodes, pairs of choices on edges, and what each adds to a step.

A `Charge` says what a choice adds to the quantities of a step: seconds of compute, seconds on a link, bytes of memory.
Time and memory of a step follow from the totals by `step_time_s` and `peak_bytes`; the integer program states the same
two formulas as linear constraints, and the estimator evaluates them. Nothing here knows of tensors or layouts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Charge = Mapping[str, float]
"""Quantity name -> amount. Names: see `step_time_s` and `peak_bytes`."""

COMPUTE_FORWARD = "compute.forward"
COMPUTE_BACKWARD = "compute.backward"
EXPOSED = "exposed"
MEMORY = "memory."
SLOWDOWN_FORWARD = "slowdown.forward"
SLOWDOWN_BACKWARD = "slowdown.backward"
BLOCKING_FORWARD = "blocking.forward."
BLOCKING_BACKWARD = "blocking.backward."
PREFETCH_FORWARD = "prefetch.forward."
PREFETCH_BACKWARD = "prefetch.backward."
RESTING = frozenset(MEMORY + role for role in ("parameters", "optimizer_state", "reserve"))
"""What is there throughout, in as many bytes in any micro-batch and with any mode of checkpointing."""
TRANSIENT = "transient."
MOMENT = "moment."


def moment_quantity(key: str, role: str) -> str:
    """Return the name of the bytes of ``role`` that are alive at the moment ``key`` (no dots in either)."""
    return f"{MOMENT}{key}.{role}"


def quantities_by_moment(names: Iterable[str]) -> dict[str, list[str]]:
    """Return moment -> the quantities among ``names`` that are alive at it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if name.startswith(MOMENT):
            found[name.split(".")[1]].append(name)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Something to decide: ``charges[c]`` is what choice ``c`` adds."""

    name: str
    charges: tuple[Charge, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Two nodes whose choices meet: choice ``c`` of the producer shows port ``producer_ports[c]``, and so on.

    ``pairs`` are the (producer port, consumer port) that can meet; each adds its charge.
    """

    producer: int
    consumer: int
    producer_ports: tuple[int, ...]
    consumer_ports: tuple[int, ...]
    pairs: Mapping[tuple[int, int], Charge]


def same_producer_port(a: Edge, b: Edge) -> Edge:
    """Return an edge that holds the producers of two edges to the same port: one key of a plan names both."""
    return _same_port(a.producer, a.producer_ports, b.producer, b.producer_ports)


def same_consumer_port(a: Edge, b: Edge) -> Edge:
    """Return an edge that holds the consumers of two edges to the same port, likewise."""
    return _same_port(a.consumer, a.consumer_ports, b.consumer, b.consumer_ports)


def _same_port(node: int, ports: tuple[int, ...], other: int, other_ports: tuple[int, ...]) -> Edge:
    pairs: dict[tuple[int, int], Charge] = {(port, port): {} for port in set(ports) & set(other_ports)}
    return Edge(producer=node, consumer=other, producer_ports=ports, consumer_ports=other_ports, pairs=pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A charge that is paid once if any of ``members`` (edge, producer port, consumer port) is chosen."""

    charge: Charge
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Choose one choice per node, such that every edge shows a pair that can meet, at least time, within memory."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    units: tuple[Unit, ...]
    constant: Charge = field(default_factory=dict)

    def quantities(self) -> list[str]:
        """Return the name of every quantity that anything adds to."""
        names = set(self.constant)
        for node in self.nodes:
            names.update(name for charge in node.charges for name in charge)
        for edge in self.edges:
            names.update(name for charge in edge.pairs.values() for name in charge)
        for unit in self.units:
            names.update(unit.charge)
        return sorted(names)


Assignment = Sequence[int]
"""The choice of each node."""


class InfeasibleAssignmentError(ValueError):
    """An assignment in which two choices cannot meet."""


def edge_pair(problem: Problem, edge: Edge, assignment: Assignment) -> tuple[int, int]:
    """Return the ports that meet on ``edge``."""
    return edge.producer_ports[assignment[edge.producer]], edge.consumer_ports[assignment[edge.consumer]]


def totals(problem: Problem, assignment: Assignment) -> dict[str, float]:
    """Return the total of every quantity under ``assignment``.

    Raises:
        InfeasibleAssignmentError: two choices cannot meet.
    """
    total: dict[str, float] = defaultdict(float)

    def add(charge: Charge) -> None:
        for name, amount in charge.items():
            total[name] += amount

    add(problem.constant)
    for node, choice in zip(problem.nodes, assignment, strict=True):
        add(node.charges[choice])
    shown = []
    for edge in problem.edges:
        pair = edge_pair(problem, edge, assignment)
        if pair not in edge.pairs:
            raise InfeasibleAssignmentError(
                f"{problem.nodes[edge.producer].name} and {problem.nodes[edge.consumer].name} cannot meet"
            )
        add(edge.pairs[pair])
        shown.append(pair)
    for unit in problem.units:
        if any(shown[edge] == (p, q) for edge, p, q in unit.members):
            add(unit.charge)
    return dict(total)


def _links(names: Iterator[str] | Sequence[str]) -> list[str]:
    prefixes = (BLOCKING_FORWARD, BLOCKING_BACKWARD, PREFETCH_FORWARD, PREFETCH_BACKWARD)
    return sorted({name[len(prefix) :] for name in names for prefix in prefixes if name.startswith(prefix)})


class PhaseQuantities(NamedTuple):
    """Quantities of a phase: names of what computes and what that is slowed by, prefixes of those of a link."""

    compute: str
    slowdown: str
    blocking: str
    prefetch: str


FORWARD = PhaseQuantities(COMPUTE_FORWARD, SLOWDOWN_FORWARD, BLOCKING_FORWARD, PREFETCH_FORWARD)
BACKWARD = PhaseQuantities(COMPUTE_BACKWARD, SLOWDOWN_BACKWARD, BLOCKING_BACKWARD, PREFETCH_BACKWARD)


def phase_time_s(total: Mapping[str, float], phase: PhaseQuantities) -> float:
    """Return the seconds of one phase: compute and blocking communication, or the busiest link if that is more."""
    blocking, prefetch, links = phase.blocking, phase.prefetch, _links(list(total))
    blocked = sum(total.get(blocking + link, 0.0) for link in links)
    busiest = max((total.get(blocking + link, 0.0) + total.get(prefetch + link, 0.0) for link in links), default=0.0)
    return max(total.get(phase.compute, 0.0) + total.get(phase.slowdown, 0.0) + blocked, busiest)


def step_time_s(total: Mapping[str, float]) -> float:
    """Return the seconds of a step from the totals of its quantities.

    Forward and backward each take their compute, what communication beside it slows that by, and their blocking
    communication, or, where a link is the bottleneck, all that this link carries; what is exposed in any case (first
    gather, last reduction, optimizer) is added.
    """
    return phase_time_s(total, FORWARD) + phase_time_s(total, BACKWARD) + total.get(EXPOSED, 0.0)


def peak_bytes(total: Mapping[str, float]) -> float:
    """Return the peak bytes from the totals: what stays, the largest transient, and all that the worst moment adds."""
    largest = max((amount for name, amount in total.items() if name.startswith(TRANSIENT)), default=0.0)
    moments = quantities_by_moment(total).values()
    moment = max((sum(total[name] for name in names) for names in moments), default=0.0)
    stays = sum(amount for name, amount in total.items() if name.startswith(MEMORY))
    return stays + largest + moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solver's answer: the assignment, its price, and how far from the best it can be.

    Attributes:
        root_s: what the relaxation of the whole program came to; None where it was not solved.
    """

    assignment: tuple[int, ...]
    objective_s: float
    bound_s: float
    status: str
    time_s: float
    root_s: float | None = None

    @property
    def cut_short(self) -> bool:
        """Whether time, or the steps allowed, ran out before it was proven to be the best."""
        return self.status == "cut-short"


def brute_force(problem: Problem, memory_bytes: float | None) -> tuple[tuple[int, ...], float] | None:
    """Return the best assignment and its step time by trying all of them; None where none fits. For tests."""
    best: tuple[tuple[int, ...], float] | None = None
    for assignment in itertools.product(*(range(len(node.charges)) for node in problem.nodes)):
        try:
            total = totals(problem, assignment)
        except InfeasibleAssignmentError:
            continue
        if memory_bytes is not None and peak_bytes(total) > memory_bytes:
            continue
        time_s = step_time_s(total)
        if best is None or time_s < best[1]:
            best = assignment, time_s
    return best
