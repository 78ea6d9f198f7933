"""A published measurement with its prediction, the reading of rows, and their split into calibration and validation."""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from published.rows.corrections import corrected

Quantity = Literal["step_time_s", "peak_mem_gib", "time_us", "tflops"]
Split = Literal["calibration", "validation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRow:
    """One quantity of one row: measured, and predicted or left out with a reason.

    Attributes:
        file, row_id: the row's file, and its id there.
        source: the row's source, which decides whether the row is for calibration or validation.
        measured, predicted: values in the unit of ``quantity``; ``predicted`` is None for rows that are left out.
        left_out: why there is no prediction; None where there is one.
        tags: keys that tables group by: ``gpu``, ``family``, ``parallelism``, ``size``, ``trust``, ``precision``, ...
        checks: numbers of the checks of the accuracy table that this row counts in.
        assumed: the assumptions where a column is blank or a framework's default decides.
    """

    file: str
    row_id: str
    quantity: Quantity
    source: str
    measured: float
    predicted: float | None
    left_out: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[int, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def split(self) -> Split:
        """``calibration`` where constants may have been fitted to the row, else ``validation``."""
        return "calibration" if self.source in calibration_sources().get(self.file, ()) else "validation"

    @property
    def error(self) -> float:
        """(predicted - measured) / measured, of a row with a prediction."""
        assert self.predicted is not None
        return self.predicted / self.measured - 1.0


@cache
def calibration_sources() -> Mapping[str, frozenset[str]]:
    """Return, by file, the sources that constants are fitted to; ``split.toml`` has the reasons."""
    tables = tomllib.loads((Path(__file__).parent / "split.toml").read_text(encoding="utf-8"))
    return {file: frozenset(table["sources"]) for file, table in tables.items()}


def read(folder: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of ``folder/name``, corrected; an empty list without such a file."""
    path = folder / name
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, restval=""))
    for row in rows:
        row.pop(None, None)  # cells beyond the header
    return [corrected(row) for row in rows]


def number(row: Mapping[str, str], column: str) -> float | None:
    """Return the number in ``column``, None where it is blank or no finite number."""
    try:
        value = float(row.get(column, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
