"""The rows of training_runs.csv, training_runs_vtrain.csv and training_runs_mcore_ci.csv with predicted step times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cost_model.configuration.step import step_time
from cost_model.kernels.step_constants import StepConstants
from published.frameworks.assumptions import assumptions_of
from published.frameworks.configuration import (
    UnknownConfigurationError,
    configuration_of,
    measured_step_s,
    precision_class,
)
from published.pricing.tags import run_tags
from published.rows.machines import UnknownMachineError, cluster_of
from published.rows.models import UnknownModelError, model_of, size_class
from published.rows.priced_row import PricedRow, number, read

FILES = ("training_runs.csv", "training_runs_vtrain.csv", "training_runs_mcore_ci.csv")
CHECK_3 = "arXiv 2205.05198 Tables"
GPUS = ("A100", "H100", "H200", "B200")


def price(folder: Path, constants: StepConstants | None = None, files: tuple[str, ...] = FILES) -> list[PricedRow]:
    """Return every row of the files, priced or left out with a reason."""
    return [price_row(file, row, constants) for file in files for row in read(folder, file)]


def price_row(file: str, row: Mapping[str, str], constants: StepConstants | None = None) -> PricedRow:
    """Return one row, priced or left out with a reason."""
    tags = {
        **run_tags(row),
        "arch": row.get("arch", ""),
        "parallelism": _parallelism(row),
    }
    checks = _checks(file, row)
    try:
        predicted, measured, more = _price(row, constants)
    except (UnknownModelError, UnknownMachineError, UnknownConfigurationError, ValueError) as error:
        return PricedRow(
            file=file, row_id=row["row_id"], quantity="step_time_s", source=row["source"],
            measured=number(row, "step_time_s") or 0.0, predicted=None, left_out=str(error), tags=tags, checks=checks,
        )  # fmt: skip
    return PricedRow(
        file=file, row_id=row["row_id"], quantity="step_time_s", source=row["source"], measured=measured,
        predicted=predicted, tags={**tags, "size": more[0]}, checks=checks, assumed=(more[1],),
    )  # fmt: skip


def _price(row: Mapping[str, str], constants: StepConstants | None) -> tuple[float, float, tuple[str, str]]:
    assumed = assumptions_of(row)
    if assumed is None:
        raise UnknownConfigurationError(f"framework {row.get('framework') or 'not stated'} unknown")
    spec = model_of(row, old_dropout=assumed.dropout)
    parallel = configuration_of(row, assumed)
    measured = measured_step_s(row, spec, parallel)
    if measured is None:
        raise UnknownConfigurationError("no time, rate or FLOP/s of a known convention measured")
    predicted = step_time(spec, parallel, cluster_of(row, constants), constants).total_s
    return predicted, measured, (size_class(spec), assumed.note)


def _parallelism(row: Mapping[str, str]) -> str:
    parts = [name for name in ("tp", "pp", "cp", "ep") if (number(row, name) or 1) > 1]
    if row.get("zero_stage") == "3" or row.get("fsdp"):
        parts.insert(0, "fsdp")
    elif (number(row, "n_gpus") or 1) > 1:
        parts.insert(0, "dp")
    return "+".join(parts) or "one device"


def _checks(file: str, row: Mapping[str, str]) -> tuple[int, ...]:
    if row["source"].startswith(CHECK_3):
        return (1, 3)
    if file == "training_runs_mcore_ci.csv":
        return ()
    moe = row["arch"] in ("moe", "moe-mla")
    sixteen = precision_class(row.get("precision", "")) == "16-bit"
    if row["arch"] == "dense" and row["trust"] == "A" and row["gpu"].startswith(GPUS):
        return (1,)
    if moe and sixteen and row["trust"] in ("A", "B"):
        return (2,)
    return ()
