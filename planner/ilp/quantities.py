"""Quantities of a step: the sums of seconds and bytes that choices add to, as typed values.

Step time and peak memory are functions of these sums (`planner.ilp.step_cost`), and the integer program states the same
functions as constraints (`planner.ilp.formulation`, which gives each quantity its symbol).

Equal quantities are one object: dictionaries hash them by identity, as fast as they hash strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from hashlib import blake2b
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward"]


class Kind(Enum):
    """Kind of a quantity: what it sums, and in which unit."""

    COMPUTE = "compute"
    """Seconds of kernels in a phase."""
    SLOWDOWN = "slowdown"
    """Seconds by which overlapped communication slows down a phase's kernels."""
    BLOCKING = "blocking"
    """Seconds of communication on a link that a phase's kernels wait for."""
    PREFETCH = "prefetch"
    """Seconds of communication on a link that overlaps a phase's kernels in every micro-batch."""
    ONCE = "once"
    """Seconds of communication on a link that overlaps a phase's kernels in one micro-batch of the step."""
    EXPOSED = "exposed"
    """Seconds outside of both phases."""
    PASSES = "passes"
    """Number of micro-batches; only in a problem's constant charge."""
    PERSISTENT = "persistent"
    """Bytes of a role that are allocated during the whole step."""
    TRANSIENT = "transient"
    """Bytes of a region's working memory; only the largest of these quantities counts."""
    LIVE = "live"
    """Bytes of a role that are alive at one peak candidate."""
    LIFETIME = "lifetime"
    """Bytes that are alive at several peak candidates."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantity:
    """One quantity of a step, as the functions of this module return it.

    Attributes:
        name: differs from that of every other quantity.
        phase, link: phase and link in which the seconds are spent; None for kinds that have no phase or no link.
        role: role of the bytes, as in `planner.plan.estimate.Estimate.memory`; None for kinds without a role.
        candidate: key of the peak candidate at which the bytes are alive; None for other kinds than `Kind.LIVE`.
    """

    name: str
    kind: Kind
    phase: Phase | None = None
    link: str | None = None
    role: str | None = None
    candidate: str | None = None

    def __lt__(self, other: Quantity) -> bool:
        """Order by name, so that a program has the same rows in every process."""
        return self.name < other.name

    def __reduce__(self) -> tuple[object, ...]:
        """Unpickle to the one object of this name, in this process or another."""
        return _one, (self.name, self.kind, self.phase, self.link, self.role, self.candidate)


Charge = Mapping[Quantity, float]
"""Seconds and bytes that a choice adds, by quantity."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lifetime(Quantity):
    """Bytes that are alive at several peak candidates: they add up once, and not at each of these.

    Lifetimes with equal counts are one object. A model has far fewer lifetimes than tensors.

    Attributes:
        counts: live bytes of a role at a peak candidate -> how often they include the bytes of this lifetime.
    """

    counts: Mapping[Quantity, float] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Mapping[Quantity, float]) -> Lifetime:
        """Return the lifetime with these counts; counts of 0 are left out."""
        key = frozenset((live, float(count)) for live, count in counts.items() if count)
        if key not in _LIFETIMES:
            ordered = dict(sorted(key))
            rows = [(f"moment.{live.candidate}.{live.role}", count) for live, count in ordered.items()]
            digest = blake2b(repr(rows).encode(), digest_size=8).hexdigest()
            _LIFETIMES.setdefault(key, cls(name=f"lifetime.{digest}", kind=Kind.LIFETIME, counts=ordered))
        return _LIFETIMES[key]

    def __reduce__(self) -> tuple[object, ...]:
        """Unpickle to the one object with these counts, in this process or another."""
        return Lifetime.of, (self.counts,)

    def charge(self, nbytes: float) -> dict[Quantity, float]:
        """Return the charge of ``nbytes`` bytes with this lifetime."""
        return {self: nbytes} if nbytes and self.counts else {}

    def without(self, live: Quantity) -> Lifetime:
        """Return the lifetime without one of its counts."""
        return Lifetime.of({other: count for other, count in self.counts.items() if other is not live})


# The one object of each name, and of each set of counts. `dict.setdefault` is atomic: threads agree on the object.
_QUANTITIES: dict[str, Quantity] = {}
_LIFETIMES: dict[frozenset[tuple[Quantity, float]], Lifetime] = {}


def _one(
    name: str, kind: Kind, phase: Phase | None, link: str | None, role: str | None, candidate: str | None
) -> Quantity:
    quantity = Quantity(name=name, kind=kind, phase=phase, link=link, role=role, candidate=candidate)
    return _QUANTITIES.setdefault(name, quantity)


def _quantity(
    kind: Kind,
    *keys: str,
    phase: Phase | None = None,
    link: str | None = None,
    role: str | None = None,
    candidate: str | None = None,
) -> Quantity:
    return _one(".".join((kind.value, *keys)), kind, phase, link, role, candidate)


NEVER_ALIVE = Lifetime.of({})
EXPOSED = _quantity(Kind.EXPOSED)
PASSES = _quantity(Kind.PASSES)


@cache
def persistent(role: str) -> Quantity:
    """Return the quantity of bytes of ``role`` that are allocated during the whole step."""
    return _quantity(Kind.PERSISTENT, role, role=role)


STATIC = frozenset(map(persistent, ("parameters", "optimizer_state", "allocator", "context")))
"""Persistent bytes that depend neither on the micro-batches nor on checkpointing."""


@cache
def transient(region: int) -> Quantity:
    """Return the quantity of bytes of working memory of the region of that index."""
    return _quantity(Kind.TRANSIENT, str(region))


@cache
def live(candidate: str, role: str) -> Quantity:
    """Return the quantity of bytes of ``role`` that are alive at the peak candidate of that key."""
    return _quantity(Kind.LIVE, candidate, role, role=role, candidate=candidate)


class LinkQuantities:
    """The quantities of one kind and phase, by link: ``FORWARD.blocking["inside-node"]``."""

    __slots__ = ("_by_link", "_kind", "_phase")

    def __init__(self, kind: Kind, phase: Phase) -> None:
        self._kind = kind
        self._phase = phase
        self._by_link: dict[str, Quantity] = {}

    def __getitem__(self, link: str) -> Quantity:
        try:
            return self._by_link[link]
        except KeyError:
            name = f"{self._kind.value}.{self._phase}.{link}"
            quantity = self._by_link[link] = _one(name, self._kind, self._phase, link, None, None)
            return quantity


class PhaseQuantities(NamedTuple):
    """The quantities of one phase of a step."""

    compute: Quantity
    slowdown: Quantity
    blocking: LinkQuantities
    prefetch: LinkQuantities
    once: LinkQuantities

    @classmethod
    def of(cls, phase: Phase) -> PhaseQuantities:
        """Return the quantities of ``phase``."""
        return cls(
            compute=_quantity(Kind.COMPUTE, phase, phase=phase),
            slowdown=_quantity(Kind.SLOWDOWN, phase, phase=phase),
            blocking=LinkQuantities(Kind.BLOCKING, phase),
            prefetch=LinkQuantities(Kind.PREFETCH, phase),
            once=LinkQuantities(Kind.ONCE, phase),
        )


FORWARD = PhaseQuantities.of("forward")
BACKWARD = PhaseQuantities.of("backward")
