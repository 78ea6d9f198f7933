"""The choice to be made, as numbers: choices of nodes, pairs of choices on edges, and what each adds to a step.

A `Charge` says what a choice adds to the quantities of a step: seconds of compute, seconds on a link, bytes of memory.
Time and memory of a step follow from the totals by `step_time_s` and `peak_bytes`; the integer program states the same
two formulas as linear constraints, and the estimator evaluates them. Nothing here knows of tensors or layouts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

Charge = Mapping[str, float]
"""Quantity name -> amount. Names: see `step_time_s` and `peak_bytes`. `PASSES` is a constant of the problem's."""

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
ONCE_FORWARD = "once.forward."
ONCE_BACKWARD = "once.backward."
PASSES = "passes"
RESTING = frozenset(MEMORY + role for role in ("parameters", "optimizer_state", "reserve"))
"""What is there throughout, in as many bytes in any micro-batch and with any mode of checkpointing."""
TRANSIENT = "transient."
MOMENT = "moment."
LIFETIME = "lifetime."


def moment_quantity(key: str, role: str) -> str:
    """Return the name of the bytes of ``role`` that are alive at the moment ``key`` (no dots in either)."""
    return f"{MOMENT}{key}.{role}"


def moment_of(name: str) -> str:
    """Return the key of the moment that a quantity's bytes are alive at."""
    return name.split(".")[1]


class Lifetime(str):
    """The name of a quantity of bytes that are alive at several moments: they add up once, not at each of them.

    Two with the same counts have the same name. There are far fewer of them than moments times tensors.

    Attributes:
        counts: moment's quantity -> how often the bytes are there at it.
    """

    __slots__ = ("counts",)
    counts: Mapping[str, float]

    @classmethod
    def of(cls, counts: Mapping[str, float]) -> Lifetime:
        """Return the lifetime with these counts; those that are 0 are left out."""
        return _lifetime(frozenset((name, float(count)) for name, count in counts.items() if count))

    def __reduce__(self) -> tuple[Callable[..., Lifetime], tuple[frozenset[tuple[str, float]]]]:
        """Keep the counts in a copy, and in what is sent to another process."""
        return _lifetime, (frozenset(self.counts.items()),)

    def charge(self, nbytes: float) -> dict[str, float]:
        """Return what so many bytes with this lifetime add."""
        return {self: nbytes} if nbytes and self.counts else {}

    def without(self, name: str) -> Lifetime:
        """Return it without the quantity of one moment."""
        return Lifetime.of({other: count for other, count in self.counts.items() if other != name})


@lru_cache(maxsize=2**12)
def _lifetime(counts: frozenset[tuple[str, float]]) -> Lifetime:
    ordered = sorted(counts)
    digest = blake2b(repr(ordered).encode(), digest_size=8).hexdigest()
    found = Lifetime(LIFETIME + digest)
    found.counts = dict(ordered)
    return found


NEVER_ALIVE = Lifetime.of({})


def bytes_by_moment(total: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return moment -> quantity -> the bytes alive at it, those of lifetimes spread over their moments."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, amount in total.items():
        for quantity, count in name.counts.items() if isinstance(name, Lifetime) else ((name, 1.0),):
            if quantity.startswith(MOMENT):
                found[moment_of(quantity)][quantity] += count * amount
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


def same_producer_port(a: Edge, b: Edge, agree: Callable[[int, int], bool]) -> Edge:
    """Return an edge that holds the producers of two edges to ports that agree: one key of a plan names both."""
    return _same_port(a.producer, a.producer_ports, b.producer, b.producer_ports, agree)


def same_consumer_port(a: Edge, b: Edge, agree: Callable[[int, int], bool]) -> Edge:
    """Return an edge that holds the consumers of two edges to ports that agree, likewise."""
    return _same_port(a.consumer, a.consumer_ports, b.consumer, b.consumer_ports, agree)


def _same_port(
    node: int, ports: tuple[int, ...], other: int, other_ports: tuple[int, ...], agree: Callable[[int, int], bool]
) -> Edge:
    others = dict.fromkeys(other_ports)
    pairs: dict[tuple[int, int], Charge] = {(p, q): {} for p in dict.fromkeys(ports) for q in others if agree(p, q)}
    return Edge(producer=node, consumer=other, producer_ports=ports, consumer_ports=other_ports, pairs=pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCharge:
    """A charge that is paid once if any of ``members`` (edge, producer port, consumer port) is chosen."""

    charge: Charge
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Choose one choice per node, such that every edge shows a pair that can meet, at least time, within memory."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    shared_charges: tuple[SharedCharge, ...]
    constant: Charge = field(default_factory=dict)

    def quantities(self) -> list[str]:
        """Return the name of every quantity that anything adds to."""
        names = set(self.constant)
        for node in self.nodes:
            names.update(name for charge in node.charges for name in charge)
        for edge in self.edges:
            names.update(name for charge in edge.pairs.values() for name in charge)
        for shared in self.shared_charges:
            names.update(shared.charge)
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
    for shared in problem.shared_charges:
        if any(shown[edge] == (p, q) for edge, p, q in shared.members):
            add(shared.charge)
    return dict(total)


def _links(names: Iterator[str] | Sequence[str]) -> list[str]:
    links = {name[len(prefix) :] for name in names for prefix in _ON_A_LINK if name.startswith(prefix)}
    return sorted(links)


class PhaseQuantities(NamedTuple):
    """Quantities of a phase: names of what computes and what that is slowed by, prefixes of those of a link."""

    compute: str
    slowdown: str
    blocking: str
    prefetch: str
    once: str


FORWARD = PhaseQuantities(COMPUTE_FORWARD, SLOWDOWN_FORWARD, BLOCKING_FORWARD, PREFETCH_FORWARD, ONCE_FORWARD)
BACKWARD = PhaseQuantities(COMPUTE_BACKWARD, SLOWDOWN_BACKWARD, BLOCKING_BACKWARD, PREFETCH_BACKWARD, ONCE_BACKWARD)
_ON_A_LINK = (*FORWARD[2:], *BACKWARD[2:])


def phase_time_s(total: Mapping[str, float], phase: PhaseQuantities) -> float:
    """Return the seconds of one phase: compute and blocking communication, or the busiest link if that is more.

    Of all micro-batches, without what a link carries once a step; for that see `exposed_once_s`.
    """
    blocking, prefetch, links = phase.blocking, phase.prefetch, _links(list(total))
    blocked = sum(total.get(blocking + link, 0.0) for link in links)
    busiest = max((total.get(blocking + link, 0.0) + total.get(prefetch + link, 0.0) for link in links), default=0.0)
    return max(total.get(phase.compute, 0.0) + total.get(phase.slowdown, 0.0) + blocked, busiest)


def passes(total: Mapping[str, float]) -> float:
    """Return of how many micro-batches the phases of a step are."""
    return total.get(PASSES, 1.0)


def exposed_once_s(total: Mapping[str, float], phase: PhaseQuantities) -> float:
    """Return by how many seconds one micro-batch's phase grows by what a link carries once a step, in that one.

    That is the first forward, or the last backward. One of ``n`` micro-batches takes an ``n``-th of the phase, and the
    link has an ``n``-th of its other communication in it. With one micro-batch it is as if all were prefetched.
    """
    count = passes(total)
    one_s = phase_time_s(total, phase) / count
    links = (link for link in _links(list(total)) if total.get(phase.once + link))
    busiest_s = max(
        (
            total[phase.once + link]
            + (total.get(phase.blocking + link, 0.0) + total.get(phase.prefetch + link, 0.0)) / count
            for link in links
        ),
        default=0.0,
    )
    return max(busiest_s - one_s, 0.0)


def step_time_s(total: Mapping[str, float]) -> float:
    """Return the seconds of a step from the totals of its quantities.

    Forward and backward each take their compute, what communication beside it slows that by, and their blocking
    communication, or, where a link is the bottleneck, all that this link carries. What runs once a step and is more
    than one micro-batch can hide, and what is exposed in any case (first gather, last reduction, optimizer), is added.
    """
    phases = sum(phase_time_s(total, phase) + exposed_once_s(total, phase) for phase in (FORWARD, BACKWARD))
    return phases + total.get(EXPOSED, 0.0)


def peak_bytes(total: Mapping[str, float]) -> float:
    """Return the peak bytes from the totals: what stays, the largest transient, and all that the worst moment adds."""
    largest = max((amount for name, amount in total.items() if name.startswith(TRANSIENT)), default=0.0)
    moment = max((sum(alive.values()) for alive in bytes_by_moment(total).values()), default=0.0)
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
    def hit_limit(self) -> bool:
        """Whether time, or the steps allowed, ran out before it was proven to be the best."""
        return self.status == "limit"


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
