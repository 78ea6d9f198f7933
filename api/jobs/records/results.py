"""Results of jobs: which of them the time limit cut short, and which of two results of one request is better.

A result is a plan document, the rows of a comparison, or JSON data of another kind, which no time limit cuts short.
"""

from __future__ import annotations

from typing import Any

_CUT_SHORT = "time-limit"
CUT_SHORT_MARKS = (f'"{_CUT_SHORT}"', '"fits": null')
"""The JSON text of each result that was cut short has one of these, and few others do."""


def is_cut_short(result: Any) -> bool:
    """Return whether a search behind ``result`` ended at its time limit, so that a longer one may find better plans."""
    if isinstance(result, list):
        return any(row.get("status") == _CUT_SHORT or row.get("fits", True) is None for row in result)
    return bool((_solver(result).get("status")) == _CUT_SHORT)


def is_better(new: Any, old: Any) -> bool:
    """Return whether ``new`` is to replace ``old``, a result of the same request.

    Of two plans the one with the smaller predicted step time is better; of equal ones that which is proved, then that
    with the smaller gap. Of two comparisons one that is not cut short is better, then one that has more plans, then
    the faster one.
    """
    return _cost(new) < _cost(old)


def _cost(result: Any) -> tuple[float, ...]:
    """Return numbers, the first of which counts most, that are smaller for a better result."""
    if isinstance(result, list):
        step_times = [row["step_time_s"] for row in result if row.get("step_time_s") is not None]
        return is_cut_short(result), -len(step_times), sum(step_times)
    step_time_s = (result.get("estimate") or {}).get("step_time_s") if isinstance(result, dict) else None
    gap = _solver(result).get("gap")
    return (
        float("inf") if step_time_s is None else step_time_s,
        is_cut_short(result),
        float("inf") if gap is None else gap,
    )


def _solver(result: Any) -> dict[str, Any]:
    return (result.get("solver") or {}) if isinstance(result, dict) else {}
