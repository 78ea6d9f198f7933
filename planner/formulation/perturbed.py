"""Step times of a decision under the cost model's error: slower communication, less overlap, slower kernels."""

from __future__ import annotations

from collections.abc import Mapping

from planner.formulation.decision import Decision
from planner.formulation.estimate import itemise, optimizer_s
from planner.formulation.formulate import Formulator
from planner.ilp.quantities import BACKWARD, EXPOSED, FORWARD, Kind
from planner.ilp.step_cost import Totals, links_of, step_time_s
from planner.liveness.structure import Structure
from planner.plan.estimate import Perturbation

SLOWER_COMMUNICATION = 1.3
"""Seconds of every collective, as a multiple of the cost model's."""

EXPOSED_SHARE = 0.2
"""Fraction of overlapped communication that is exposed."""

SLOWER_KERNELS = 1.1
"""Seconds of every kernel, as a multiple of the cost model's."""

_COMMUNICATION = (Kind.BLOCKING, Kind.PREFETCH, Kind.ONCE, Kind.SLOWDOWN)
"""Kinds of seconds that are proportional to the seconds of collectives."""


def perturbed_step_times_s(
    formulator: Formulator, structure: Structure, decision: Decision
) -> Mapping[Perturbation, float]:
    """Return perturbation -> seconds of a step under ``decision``, whose layouts and schedule stay the same."""
    totals, optimizer = itemise(formulator, structure, decision).charge, optimizer_s(formulator, structure, decision)
    return {
        "slow-communication": step_time_s(slow_communication(totals, optimizer)),
        "exposed-communication": step_time_s(exposed_communication(totals)),
        "slow-kernels": step_time_s(slow_kernels(totals, optimizer)),
    }


def slow_communication(totals: Totals, optimizer: float) -> Totals:
    """Return the totals with all collectives, and the slowdown of kernels by them, `SLOWER_COMMUNICATION` times."""
    slower = {
        quantity: amount * SLOWER_COMMUNICATION if quantity.kind in _COMMUNICATION else amount
        for quantity, amount in totals.items()
    }
    outside = totals.get(EXPOSED, 0.0) - optimizer
    return {**slower, EXPOSED: outside * SLOWER_COMMUNICATION + optimizer}


def exposed_communication(totals: Totals) -> Totals:
    """Return the totals in which `EXPOSED_SHARE` of the overlapped seconds of every link blocks the kernels."""
    moved = dict(totals)
    for phase in (FORWARD, BACKWARD):
        for link in links_of(totals):
            overlapped = totals.get(phase.prefetch[link], 0.0) * EXPOSED_SHARE
            once = totals.get(phase.once[link], 0.0) * EXPOSED_SHARE
            for source, target, seconds in (
                (phase.prefetch[link], phase.blocking[link], overlapped),
                (phase.once[link], EXPOSED, once),
            ):
                moved[source] = moved.get(source, 0.0) - seconds
                moved[target] = moved.get(target, 0.0) + seconds
    return moved


def slow_kernels(totals: Totals, optimizer: float) -> Totals:
    """Return the totals with all kernels, and the optimizer's, `SLOWER_KERNELS` times as long."""
    slower = {
        quantity: amount * SLOWER_KERNELS if quantity.kind is Kind.COMPUTE else amount
        for quantity, amount in totals.items()
    }
    return {**slower, EXPOSED: totals.get(EXPOSED, 0.0) + (SLOWER_KERNELS - 1.0) * optimizer}
