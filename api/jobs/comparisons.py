"""The rows of a client's comparison, found within the time limit of one job."""

from __future__ import annotations

import dataclasses
from typing import Any

from api.render.tradeoff_rows import TradeoffRow, alternative_rows, batch_rows, pareto_rows, sweep_rows
from api.requests.comparisons import AlternativesRequest, BatchesRequest, Comparison, ParetoRequest
from api.requests.plan_request import OpenedRequest, opened_request
from planner.progress import Progress
from planner.tradeoffs import parts_of

_AFTERWARDS_S = 10.0
"""Seconds that a plan may take after its search: its baselines are priced, and its axes are merged."""


def comparison_rows(comparison: Comparison, *, progress: Progress, time_limit_s: float) -> list[dict[str, Any]]:
    """Return the rows of a comparison as JSON data, each with its plan.

    Args:
        comparison: a client's comparison.
        progress: called with each event of planning.
        time_limit_s: seconds for all searches together, from the end of tracing. Alternatives and Pareto fronts spend
            them in order. A sweep and batches give each search an equal part.

    Raises:
        PlannerError, ClusterError, LayoutError: there is no plan to compare; the message says why and what to do.
    """
    request = opened_request(comparison.plan_request, allow_local=False, progress=progress)
    rows = _rows(comparison, request, time_limit_s)
    return [{**row.to_dict(), "plan": None if row.plan is None else row.plan.to_dict()} for row in rows]


def _rows(comparison: Comparison, request: OpenedRequest, time_limit_s: float) -> list[TradeoffRow]:
    mesh = None if request.spec.mesh is None else str(request.spec.mesh)
    if isinstance(comparison, AlternativesRequest):
        return alternative_rows(dataclasses.replace(request, shares_time=True), comparison.count, time_limit_s)
    if isinstance(comparison, ParetoRequest):
        return pareto_rows(dataclasses.replace(request, shares_time=True), mesh, time_limit_s)
    within_s = comparison.within_s
    if isinstance(comparison, BatchesRequest):
        each_s = seconds_each(time_limit_s, comparison.most.bit_length())
        return batch_rows(request, mesh, most=comparison.most, within_s=within_s, time_limit_s=each_s)
    counts = comparison.devices
    each_s = seconds_each(time_limit_s, len(parts_of(request.cluster) if counts is None else set(counts)))
    return sweep_rows(
        request, comparison.objective, within_s=within_s, price=comparison.price, time_limit_s=each_s, counts=counts
    )


def seconds_each(time_limit_s: float, searches: int) -> float:
    """Return the seconds for each of some searches, such that they and what follows them end within the limit."""
    each_s = time_limit_s / searches
    return max(each_s - _AFTERWARDS_S, each_s / 2)
