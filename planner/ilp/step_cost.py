"""Step time and peak memory as functions of the totals of quantities: what the integer program states as constraints.

With the symbols of `planner.ilp.formulation`, and the totals of an assignment in place of variables.
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
    """Return the links that any of the quantities is of, in order."""
    return sorted({quantity.link for quantity in quantities if quantity.link is not None})


def passes(total: Totals) -> float:
    """Return the number of micro-batches whose phases the totals add up."""
    return total.get(PASSES, 1.0)


def phase_time_s(total: Totals, phase: PhaseQuantities) -> float:
    """Return the seconds of a phase: compute and blocking communication, or the busiest link's if that is more.

    Of all micro-batches, without the communication of once a step: see `exposed_once_s`.
    """
    blocking, prefetch, links = phase.blocking, phase.prefetch, links_of(total)
    blocked = sum(total.get(blocking[link], 0.0) for link in links)
    busiest = max((total.get(blocking[link], 0.0) + total.get(prefetch[link], 0.0) for link in links), default=0.0)
    return max(total.get(phase.compute, 0.0) + total.get(phase.slowdown, 0.0) + blocked, busiest)


def exposed_once_s(total: Totals, phase: PhaseQuantities) -> float:
    """Return the seconds by which the communication of once a step extends the phase of one micro-batch.

    That is the first forward, or the last backward. One of ``n`` micro-batches takes an ``n``-th of the phase, and the
    link carries an ``n``-th of its other communication meanwhile.
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
    """Return the seconds of a step.

    Forward and backward each take their kernels, what overlapped communication slows these down by, and their blocking
    communication; or, where a link is the bottleneck, all that this link carries. Added are what communication of once
    a step extends one micro-batch by, and what is exposed in any case: the first all-gather, the last reduction, the
    optimizer.
    """
    phases = sum(phase_time_s(total, phase) + exposed_once_s(total, phase) for phase in (FORWARD, BACKWARD))
    return phases + total.get(EXPOSED, 0.0)


def live_bytes(total: Totals) -> dict[str, dict[str, float]]:
    """Return the live bytes by peak candidate and role, those of lifetimes added to each of their candidates."""
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
    """Return the peak bytes: persistent memory, the largest working memory, and the most that is alive at once."""
    transient = max((amount for quantity, amount in total.items() if quantity.kind is Kind.TRANSIENT), default=0.0)
    live = max((sum(roles.values()) for roles in live_bytes(total).values()), default=0.0)
    persistent = sum(amount for quantity, amount in total.items() if quantity.kind is Kind.PERSISTENT)
    return persistent + transient + live
