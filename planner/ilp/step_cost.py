"""Step time and peak memory of an assignment, as functions of the totals of its quantities.

`planner.ilp.formulation` states the same functions as constraints of the integer program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from planner.ilp.quantities import (
    BACKWARD,
    EXPOSED,
    FORWARD,
    PASSES,
    Kind,
    Lifetime,
    PhaseQuantities,
    Quantity,
)

Totals = Mapping[Quantity, float]
"""Seconds and bytes of a step by quantity."""


def links_of(quantities: Iterable[Quantity]) -> list[str]:
    """Return the links of ``quantities``, sorted by name."""
    return sorted({quantity.link for quantity in quantities if quantity.link is not None})


def passes(total: Totals) -> float:
    """Return the number of micro-batches that the totals are summed over."""
    return total.get(PASSES, 1.0)


def phase_time_s(total: Totals, phase: PhaseQuantities) -> float:
    """Return the seconds of a phase, summed over all micro-batches.

    They are the seconds of kernels, of their slowdown and of blocking communication, or those of the busiest link if
    that takes longer. Once-a-step communication is left out: see `exposed_once_s`.
    """
    blocking, prefetch, links = phase.blocking, phase.prefetch, links_of(total)
    blocked = sum(total.get(blocking[link], 0.0) for link in links)
    busiest = max((total.get(blocking[link], 0.0) + total.get(prefetch[link], 0.0) for link in links), default=0.0)
    return max(total.get(phase.compute, 0.0) + total.get(phase.slowdown, 0.0) + blocked, busiest)


def exposed_once_s(total: Totals, phase: PhaseQuantities) -> float:
    """Return the seconds by which once-a-step communication extends the phase of one micro-batch.

    The micro-batch is the first in the forward, and the last in the backward. One of ``n`` micro-batches takes 1/n of
    the phase. Meanwhile, each link carries 1/n of its other communication.
    """
    count = passes(total)
    one_s = phase_time_s(total, phase) / count
    links = (link for link in links_of(total) if total.get(phase.once[link]))
    busiest_s = max(
        (
            total[phase.once[link]]
            + (total.get(phase.blocking[link], 0.0) + total.get(phase.prefetch[link], 0.0)) / count
            for link in links
        ),
        default=0.0,
    )
    return max(busiest_s - one_s, 0.0)


def step_time_s(total: Totals) -> float:
    """Return the seconds of a step: of forward and backward, plus the exposed seconds outside of both.

    A phase takes the seconds of its kernels, of their slowdown by overlapped communication, and of its blocking
    communication. If a link is the bottleneck, the phase takes the seconds of all communication on that link instead.
    Once-a-step communication can extend the phase of one micro-batch. Exposed outside of both phases are the first
    all-gather, the last reduction and the optimizer.
    """
    phases = sum(phase_time_s(total, phase) + exposed_once_s(total, phase) for phase in (FORWARD, BACKWARD))
    return phases + total.get(EXPOSED, 0.0)


def live_bytes(total: Totals) -> dict[str, dict[str, float]]:
    """Return peak candidate -> role -> live bytes. The bytes of a lifetime count at each of its candidates."""
    by_candidate: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for quantity, amount in total.items():
        counts = quantity.counts if isinstance(quantity, Lifetime) else {quantity: 1.0}
        for live, count in counts.items():
            if live.kind is Kind.LIVE:
                assert live.candidate is not None
                assert live.role is not None
                by_candidate[live.candidate][live.role] += count * amount
    return by_candidate


def peak_bytes(total: Totals) -> float:
    """Return the peak bytes: persistent bytes, the largest working memory, and the most live bytes at any candidate."""
    transient = max((amount for quantity, amount in total.items() if quantity.kind is Kind.TRANSIENT), default=0.0)
    live = max((sum(roles.values()) for roles in live_bytes(total).values()), default=0.0)
    persistent = sum(amount for quantity, amount in total.items() if quantity.kind is Kind.PERSISTENT)
    return persistent + transient + live
