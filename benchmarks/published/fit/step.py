"""The fit of ``cost_model/kernels/step_constants.toml`` to the calibration sources of runs and of memory.csv."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_model.kernels.step_constants import StepConstants, shipped_constants
from published.fit.coordinate_search import fit
from published.fit.toml_text import four_digits
from published.pricing import memory, runs
from published.rows.priced_row import PricedRow, calibration_sources, read

Price = Callable[[Mapping[str, float]], Sequence[PricedRow]]

HEADER = """Constants of a whole training step; step_constants.py describes each. Written by
benchmarks/calibrate_from_published.py on {date}; do not edit. Shares have no unit, *_s are seconds, *_bytes bytes.
gfx942 is assumed: no training run on it decides a constant. A value at a bound of FITTED
(benchmarks/published/fit/step.py) is not decided by the rows."""

ASSUMED_SHARES = {"gfx942": 0.8}
"""Architecture -> share of the stand-alone GEMM rate, if no calibration row determines it. Assumed, as on Blackwell."""

FITTED = {
    "sm80": (0.95, 0.7, 1.0),
    "sm90": (0.85, 0.7, 1.0),
    "sm100": (0.85, 0.6, 1.0),
    "expert_share": (0.7, 0.3, 1.0),
    "stream_share": (0.75, 0.5, 1.0),
    "fused_stream_share": (0.7, 0.5, 1.0),
    "host_op_s": (1.5e-5, 3e-6, 4e-5),
    "power_exponent": (0.4, 0.2, 1.0),
}
"""Constant fitted to step times -> (start of the search, least plausible value, largest plausible value)."""

FITTED_MEMORY = {"fragmentation_share": (0.1, 0.005, 0.3)}
"""Constant fitted to peaks of memory -> the same."""

THINNED = {"training_runs_vtrain.csv": 10}
"""File -> n, where every n-th calibration row is used: 900 runs of one node say little more than 90."""


def calibrate(folder: Path) -> dict[str, object]:
    """Return the tables of ``step_constants.toml``: the fitted constants, and their sources and numbers of rows."""
    return {**_fit_times(folder), **_fit_memory(folder)}


def calibration_rows(folder: Path) -> list[tuple[str, dict[str, str]]]:
    """Return (file, row) of the training runs that constants are fitted to."""
    found = []
    for file in runs.FILES:
        sources = calibration_sources().get(file, frozenset())
        rows = [row for row in read(folder, file) if row["source"] in sources]
        found += [(file, row) for row in rows[:: THINNED.get(file, 1)]]
    return found


def with_constants(values: Mapping[str, float]) -> StepConstants:
    """Return the shipped constants, of which ``values`` replaces some; its keys are those of ``FITTED``."""
    shares = {name: value for name, value in values.items() if name.startswith("sm")}
    others = {name: value for name, value in values.items() if not name.startswith("sm")}
    return dataclasses.replace(shipped_constants(), gemm_share={**ASSUMED_SHARES, **shares}, **others)


def _fit_times(folder: Path) -> dict[str, object]:
    rows = calibration_rows(folder)

    def priced(values: Mapping[str, float]) -> list[PricedRow]:
        constants = with_constants(values)
        return [runs.price_row(file, row, constants) for file, row in rows]

    best, least = _fit(FITTED, priced)
    shares = ASSUMED_SHARES | {name: value for name, value in best.items() if name.startswith("sm")}
    tables: dict[str, object] = {"gemm_share": {"value": {key: four_digits(value) for key, value in shares.items()}}}
    tables |= {name: {"value": four_digits(value)} for name, value in best.items() if not name.startswith("sm")}
    return {**tables, "fit": _provenance(priced(best), least)}


def _fit_memory(folder: Path) -> dict[str, object]:
    sources = calibration_sources().get(memory.FILE, frozenset())

    def priced(values: Mapping[str, float]) -> list[PricedRow]:
        figures: dict[str, Any] = dict(values)
        constants = dataclasses.replace(shipped_constants(), **figures)
        return [row for row in memory.price(folder, constants) if row.source in sources]

    best, least = _fit(FITTED_MEMORY, priced)
    tables: dict[str, object] = {name: {"value": four_digits(value)} for name, value in best.items()}
    return {**tables, "fit_memory": _provenance(priced(best), least)}


def _fit(search: Mapping[str, tuple[float, float, float]], priced: Price) -> tuple[dict[str, float], float]:
    start = {name: first for name, (first, _, _) in search.items()}
    return fit(start, priced, {name: (low, high) for name, (_, low, high) in search.items()})


def _provenance(rows: Sequence[PricedRow], least: float) -> dict[str, object]:
    used = [row for row in rows if row.predicted is not None]
    return {
        "rows": len(used),
        "mean_abs_log_error": four_digits(least),
        "sources": sorted({f"{row.file}: {row.source}" for row in used}),
    }
