"""The choice of a plan among the fastest plan of the search and the baselines: the simplest that costs the same.

The cost model errs by more than such plans differ. So a simpler plan is chosen where it costs little more than the
fastest, or where it is faster under an error that the cost model may well have:

- *Tied*: the plan takes at most ``tolerance`` longer than the fastest.
- *Robust*: the plan has no more axes than the fastest, takes at most `ROBUST_SHARE` longer, and is faster under at
  least one perturbation (`planner.formulation.perturbed`).
- *Stable*: under each perturbation, the plan takes at most `ROBUST_SHARE` longer than the best candidate, or
  ``tolerance`` if that is more.

Of the tied and robust plans, those that are stable come first (where none is, those that are least behind under any
perturbation), then the plan with the fewest mesh axes, then the baselines in the order in which they are given: a
baseline has one layout for all weights, which the fastest plan of the search need not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from planner.plan.estimate import Perturbation

ROBUST_SHARE = 0.05
"""Most that a robust plan may take longer than the fastest, and a stable plan than the best under a perturbation."""

_SAME = 1e-9
"""Relative difference up to which step times count as equal."""

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender(Generic[PlanT]):
    """A plan that can be chosen.

    Attributes:
        plan: the plan.
        step_time_s: seconds of a step.
        axes: number of mesh axes with more than one rank.
        perturbed_s: perturbation -> seconds of a step; empty where the plan is not priced under them.
    """

    plan: PlanT
    step_time_s: float
    axes: int
    perturbed_s: Mapping[Perturbation, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[PlanT]):
    """The chosen plan.

    Attributes:
        is_fastest: whether no contender is faster than it.
        loses_under: a perturbation under which the fastest plan is slower than it, where that is why it was chosen.
        among: all plans that it was chosen among, itself included.
    """

    contender: Contender[PlanT]
    is_fastest: bool
    loses_under: Perturbation | None = None
    among: tuple[Contender[PlanT], ...] = ()


def choose(fastest: Contender[PlanT], baselines: Sequence[Contender[PlanT]], tolerance: float) -> Choice[PlanT]:
    """Return the simplest plan that costs the same as the fastest.

    Args:
        fastest: the fastest plan of the search.
        baselines: plans that have one layout for all weights, the simplest first. They may be faster than ``fastest``
            by the solver's gap.
        tolerance: relative step time that a simpler plan may cost more; 0: the fastest plan is chosen.
    """
    contenders = [*baselines, fastest]
    best_s = min(each.step_time_s for each in contenders)
    if not tolerance:
        first = min(reversed(contenders), key=lambda each: each.step_time_s)
        return Choice(contender=first, is_fastest=True, among=tuple(contenders))
    acceptable = [
        each
        for each in contenders
        if each is fastest
        or each.step_time_s <= best_s * (1.0 + tolerance)
        or (each.axes <= fastest.axes and _wins_under(each, fastest) is not None)
    ]
    share = max(ROBUST_SHARE, tolerance)
    chosen = min(acceptable, key=lambda each: (max(_behind(each, contenders), share), each.axes))
    if chosen.step_time_s <= best_s * (1.0 + _SAME):
        return Choice(contender=chosen, is_fastest=True, among=tuple(contenders))
    is_tied = chosen.step_time_s <= best_s * (1.0 + tolerance)
    loses_under = None if is_tied else _wins_under(chosen, fastest)
    return Choice(contender=chosen, is_fastest=False, loses_under=loses_under, among=tuple(contenders))


def _wins_under(simpler: Contender[PlanT], fastest: Contender[PlanT]) -> Perturbation | None:
    """Return a perturbation under which a plan beats the fastest; None: there is none, or it costs too much."""
    if simpler.step_time_s > fastest.step_time_s * (1.0 + ROBUST_SHARE):
        return None
    return next(
        (name for name, time_s in simpler.perturbed_s.items() if time_s < fastest.perturbed_s.get(name, 0.0)), None
    )


def _behind(contender: Contender[PlanT], contenders: Sequence[Contender[PlanT]]) -> float:
    """Return the most that a plan takes longer, relatively, than the best contender under any perturbation."""
    return max(
        (
            time_s / min(each.perturbed_s.get(name, time_s) for each in contenders) - 1.0
            for name, time_s in contender.perturbed_s.items()
        ),
        default=0.0,
    )
