"""The rows of memory.csv with predicted peak memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cost_model.configuration.memory import step_memory
from cost_model.kernels.step_constants import StepConstants
from published.frameworks.assumptions import assumptions_of
from published.frameworks.configuration import UnknownConfigurationError, configuration_of
from published.pricing.tags import run_tags
from published.rows.machines import UnknownMachineError, cluster_of
from published.rows.models import UnknownModelError, model_of, size_class
from published.rows.priced_row import PricedRow, number, read

FILE = "memory.csv"
GIB = 2.0**30
ALLOCATED = ("allocated", "peak active", "peak allocated", "rank-0 peak", "wandb", "peak memory gb", "gb as printed")
"""Starts of ``mem_stat`` for allocated (or active) bytes, which Megatron prints. All others are for reserved bytes."""


def price(folder: Path, constants: StepConstants | None = None) -> list[PricedRow]:
    """Return every row of the file, priced or left out with a reason."""
    dates = {row["row_id"]: row["source_date"] for row in read(folder, "training_runs.csv")}
    rows = read(folder, FILE)
    return [
        price_row({**row, "source_date": dates.get(row["source_row"].rpartition(":")[2], "")}, constants)
        for row in rows
    ]


def price_row(row: Mapping[str, str], constants: StepConstants | None = None) -> PricedRow:
    """Return one row, priced or left out with a reason."""
    tags = {
        **run_tags(row),
        "checkpointing": row.get("act_ckpt", "") or "not stated",
    }
    measured = _measured_gib(row)
    checks = (4,) if row["kind"] == "measured" and row["trust"] == "A" else ()
    try:
        predicted, size, note = _price(row, measured, constants)
    except (UnknownModelError, UnknownMachineError, UnknownConfigurationError, ValueError) as error:
        return PricedRow(
            file=FILE, row_id=row["row_id"], quantity="peak_mem_gib", source=row["source"], measured=measured or 0.0,
            predicted=None, left_out=str(error), tags=tags, checks=checks,
        )  # fmt: skip
    return PricedRow(
        file=FILE, row_id=row["row_id"], quantity="peak_mem_gib", source=row["source"], measured=measured or 0.0,
        predicted=predicted, tags={**tags, "size": size}, checks=checks, assumed=(note,),
    )  # fmt: skip


def _measured_gib(row: Mapping[str, str]) -> float | None:
    """Return the measured GiB; a value "as printed" is converted from the framework's gigabyte."""
    measured, assumed = number(row, "value_gib"), assumptions_of(row)
    if measured and assumed is not None and "as printed" in row.get("mem_stat", ""):
        return measured * assumed.printed_gigabyte / GIB
    return measured


def _price(row: Mapping[str, str], measured: float | None, constants: StepConstants | None) -> tuple[float, str, str]:
    if row["kind"] != "measured":
        raise UnknownConfigurationError(f"kind {row['kind']}: not a measurement")
    if not measured:
        raise UnknownConfigurationError("no bytes measured (out of memory, or another unit)")
    if not row["quantity"].startswith("peak"):
        raise UnknownConfigurationError("quantity is not the peak of a step")
    assumed = assumptions_of(row)
    if assumed is None:
        raise UnknownConfigurationError(f"framework {row.get('framework') or 'not stated'} unknown")
    spec = model_of({**row, "arch": row.get("arch", "")}, old_dropout=assumed.dropout)
    parallel = configuration_of(row, assumed)
    rank = None
    statistic = (row.get("mem_stat", "") + row.get("notes", "")).lower()
    if "last rank" in statistic or "last stage" in statistic:
        rank = parallel.pipeline - 1
    elif "rank-0" in statistic:
        rank = 0
    memory = step_memory(spec, parallel, cluster_of(row), constants, rank=rank)
    reserved = "reserved" in row["quantity"] or not statistic.startswith(ALLOCATED)
    return (memory.reserved if reserved else memory.allocated) / GIB, size_class(spec), assumed.note
