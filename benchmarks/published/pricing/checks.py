"""The checks of the accuracy table: their rows, their targets, and the errors of these rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from published.rows.priced_row import PricedRow

Rows = Sequence[PricedRow]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of the accuracy table and its targets. Errors are shares of the measured values.

    Attributes:
        counts: returns whether a row counts in the check.
        mean: largest allowed mean absolute error.
        within: (error, share), where at least ``share`` of the rows must be within ``error``; None for no target. The
            error is 0.15, the only one that `holds` counts.
        under: largest allowed error of a prediction that is too low; None for no target.
        scope: least share of the rows that must have a prediction; None for no target.
    """

    number: int
    name: str
    counts: Callable[[PricedRow], bool]
    mean: float
    within: tuple[float, float] | None = None
    under: float | None = None
    scope: float | None = None


def _precision(name: str) -> Callable[[PricedRow], bool]:
    return lambda row: 1 in row.checks and row.tags.get("precision") == name


def _large(row: PricedRow) -> bool:
    return row.tags.get("size") == ">= 256 MiB"


CHECKS = (
    Check(
        number=1, name="step time, 16-bit dense", counts=_precision("16-bit"), mean=0.08, within=(0.15, 0.9), scope=0.85
    ),
    Check(number=1, name="step time, fp8 dense", counts=_precision("fp8"), mean=0.12),
    Check(number=2, name="step time, experts, 16-bit", counts=lambda row: 2 in row.checks, mean=0.15),
    Check(number=3, name="step time, sequence-parallel paper", counts=lambda row: 3 in row.checks, mean=0.05),
    Check(number=4, name="peak memory", counts=lambda row: 4 in row.checks, mean=0.08, under=0.1),
    Check(
        number=6,
        name="collectives, one node",
        counts=lambda row: 6 in row.checks and row.tags["nodes"] == "one node",
        mean=0.15,
    ),
    Check(
        number=6,
        name="collectives, one node, 256 MB and more",
        counts=lambda row: 6 in row.checks and row.tags["nodes"] == "one node" and _large(row),
        mean=0.06,
    ),
    Check(
        number=6,
        name="collectives, several nodes",
        counts=lambda row: 6 in row.checks and row.tags["nodes"] == "several nodes",
        mean=0.2,
    ),
    Check(
        number=6,
        name="collectives, several nodes, 256 MB and more",
        counts=lambda row: 6 in row.checks and row.tags["nodes"] == "several nodes" and _large(row),
        mean=0.09,
    ),
    Check(
        number=7,
        name="collectives after a sweep, one node",
        counts=lambda row: 7 in row.checks and row.tags["nodes"] == "one node",
        mean=0.06,
    ),
    Check(
        number=7,
        name="collectives after a sweep, several nodes",
        counts=lambda row: 7 in row.checks and row.tags["nodes"] == "several nodes",
        mean=0.07,
    ),
    Check(number=8, name="GEMMs and attention", counts=lambda row: 8 in row.checks, mean=0.1),
)
"""Check 5 compares with torch's MemTracker (benchmarks/memory.py) and has no rows here."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The errors of some rows, as shares of the measured values.

    Attributes:
        rows, priced: number of rows, and of rows with a prediction.
        mean, median: mean and median absolute error.
        signed: mean signed error.
        within_15: share of the priced rows whose absolute error is at most 0.15.
        worst_under: error of the prediction that is most too low, below 0; 0.0 where none is too low.
    """

    rows: int
    priced: int
    mean: float
    median: float
    signed: float
    within_15: float
    worst_under: float


def figures(rows: Rows) -> Figures:
    """Return the errors of the rows that have a prediction; zeros where none has."""
    errors = [row.error for row in rows if row.predicted is not None and row.measured > 0]
    if not errors:
        return Figures(rows=len(rows), priced=0, mean=0.0, median=0.0, signed=0.0, within_15=0.0, worst_under=0.0)
    sizes = [abs(error) for error in errors]
    return Figures(
        rows=len(rows),
        priced=len(errors),
        mean=statistics.fmean(sizes),
        median=statistics.median(sizes),
        signed=statistics.fmean(errors),
        within_15=sum(size <= 0.15 for size in sizes) / len(sizes),
        worst_under=min(0.0, *errors),
    )


def holds(check: Check, errors: Figures) -> bool:
    """Return whether the targets of the check are met."""
    if not errors.priced or errors.mean > check.mean:
        return False
    if check.within is not None and errors.within_15 < check.within[1]:
        return False
    if check.under is not None and errors.worst_under < -check.under:
        return False
    return check.scope is None or errors.priced >= check.scope * errors.rows


def target(check: Check) -> str:
    """Return the targets of the check as text."""
    parts = [f"mean {check.mean:.0%}"]
    if check.within is not None:
        parts.append(f"{check.within[1]:.0%} within {check.within[0]:.0%}")
    if check.under is not None:
        parts.append(f"none under by more than {check.under:.0%}")
    if check.scope is not None:
        parts.append(f"{check.scope:.0%} in scope")
    return ", ".join(parts)
