"""The rows of memory.csv with predicted peak memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cost_model.configuration.memory import StepMemory, step_memory
from cost_model.hardware.cluster import ClusterSpec
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


LEFT_OUT = (UnknownModelError, UnknownMachineError, UnknownConfigurationError, ValueError)
"""Exceptions whose message is the reason why a row is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMemory:
    """A row's memory as the model prices it.

    Attributes:
        memory: the phases of a step on the rank that the row is about.
        prints_reserved: whether the row prints reserved bytes; False: allocated or active bytes.
        size: size class of the model.
        note: the framework's assumptions.
    """

    memory: StepMemory
    cluster: ClusterSpec
    prints_reserved: bool
    size: str
    note: str

    @property
    def printed(self) -> float:
        """Bytes of what the row prints."""
        return self.memory.reserved if self.prints_reserved else self.memory.allocated


def dated_rows(folder: Path) -> list[dict[str, str]]:
    """Return every row of the file, with the date of its source."""
    dates = {row["row_id"]: row["source_date"] for row in read(folder, "training_runs.csv")}
    return [{**row, "source_date": dates.get(row["source_row"].rpartition(":")[2], "")} for row in read(folder, FILE)]


def price(folder: Path, constants: StepConstants | None = None) -> list[PricedRow]:
    """Return every row of the file, priced or left out with a reason."""
    return [price_row(row, constants) for row in dated_rows(folder)]


def price_row(row: Mapping[str, str], constants: StepConstants | None = None) -> PricedRow:
    """Return one row, priced or left out with a reason."""
    tags = {
        **run_tags(row),
        "checkpointing": row.get("act_ckpt", "") or "not stated",
    }
    measured = measured_gib(row)
    checks = (4,) if row["kind"] == "measured" and row["trust"] == "A" else ()
    try:
        priced = memory_of(row, constants)
    except LEFT_OUT as error:
        return PricedRow(
            file=FILE, row_id=row["row_id"], quantity="peak_mem_gib", source=row["source"], measured=measured or 0.0,
            predicted=None, left_out=str(error), tags=tags, checks=checks,
        )  # fmt: skip
    return PricedRow(
        file=FILE, row_id=row["row_id"], quantity="peak_mem_gib", source=row["source"], measured=measured or 0.0,
        predicted=priced.printed / GIB, tags={**tags, "size": priced.size}, checks=checks, assumed=(priced.note,),
    )  # fmt: skip


def measured_gib(row: Mapping[str, str]) -> float | None:
    """Return the measured GiB; a value "as printed" is converted from the framework's gigabyte."""
    measured, assumed = number(row, "value_gib"), assumptions_of(row)
    if measured and assumed is not None and "as printed" in row.get("mem_stat", ""):
        return measured * assumed.printed_gigabyte / GIB
    return measured


def memory_of(row: Mapping[str, str], constants: StepConstants | None = None) -> RowMemory:
    """Return the memory of a row.

    Raises:
        UnknownModelError, UnknownMachineError, UnknownConfigurationError, ValueError: the row is left out, see
            `LEFT_OUT`.
    """
    if row["kind"] != "measured":
        raise UnknownConfigurationError(f"kind {row['kind']}: not a measurement")
    if not measured_gib(row):
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
    cluster = cluster_of(row)
    return RowMemory(
        memory=step_memory(spec, parallel, cluster, constants, rank=rank),
        cluster=cluster,
        prints_reserved="reserved" in row["quantity"] or not statistic.startswith(ALLOCATED),
        size=size_class(spec),
        note=assumed.note,
    )
