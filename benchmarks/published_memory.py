"""Every published peak of trust A beside its price, and whether the price is under it by more than the headroom.

    cd benchmarks && python published_memory.py --truth ../../shared/truth [--markdown]

"priced" is what the row prints, reserved or allocated bytes, by the model of `shardplan estimate --mesh`. "kept" is
what a plan with the same tensors keeps of the device: the allocated bytes, the allocator's share, and the headroom. A
row above it held more free blocks in torch's caching allocator, which gives them back where memory is short.

Exit code 1 where a price is under its row by more than the headroom.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from published.pricing.memory import GIB, LEFT_OUT, dated_rows, measured_gib, memory_of
from published.rows.priced_row import PricedRow

from cost_model.kernels.optimizer_memory import reserve_by_role
from planner.plan.job_spec import JobSpec

HEADROOM = next(float(item.default) for item in fields(JobSpec) if item.name == "headroom")
HEADER = ("row", "model", "device", "devices", "split", "measured", "priced", "error", "device's", "kept", "under")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A published peak beside its price, in GiB.

    Attributes:
        measured, priced: what the row prints, and its price.
        capacity: bytes of the device.
        kept: what a plan with the same tensors keeps: allocated bytes, the allocator's share, and the headroom.
    """

    row_id: str
    model: str
    device: str
    devices: str
    split: str
    measured: float
    priced: float
    capacity: float
    kept: float

    @property
    def under_share(self) -> float:
        """Fraction of the measured peak by which the price is too low; negative where it is too high."""
        return 1 - self.priced / self.measured

    @property
    def under_of_device(self) -> float:
        """The same bytes as a fraction of the device's memory."""
        return (self.measured - self.priced) / self.capacity

    @property
    def is_kept(self) -> bool:
        """Whether the measured peak is within what a plan with the same tensors keeps."""
        return self.measured <= self.kept


def peaks(folder: Path) -> tuple[list[Peak], dict[str, str]]:
    """Return the priced rows of trust A, the most underpriced first, and row id -> reason for those left out."""
    found, left_out = [], {}
    for row in dated_rows(folder):
        if row["kind"] != "measured" or row["trust"] != "A":
            continue
        measured = measured_gib(row)
        try:
            priced = memory_of(row)
        except LEFT_OUT as error:
            left_out[row["row_id"]] = str(error)
            continue
        assert measured is not None
        device = priced.cluster.device
        allocator_bytes = reserve_by_role(device)["allocator"] if priced.prints_reserved else 0
        kept_bytes = priced.memory.allocated + allocator_bytes + HEADROOM * device.memory_bytes
        split = PricedRow(
            file="memory.csv", row_id=row["row_id"], quantity="peak_mem_gib", source=row["source"], measured=measured,
            predicted=None,
        ).split  # fmt: skip
        found.append(
            Peak(
                row_id=row["row_id"],
                model=row["model"],
                device=device.name,
                devices=row["n_gpus"],
                split=split,
                measured=measured,
                priced=priced.printed / GIB,
                capacity=device.memory_bytes / GIB,
                kept=kept_bytes / GIB,
            )
        )
    return sorted(found, key=lambda peak: -peak.under_share), left_out


def cells(peak: Peak) -> tuple[str, ...]:
    """Return the cells of a row of the table."""
    verdict = "" if peak.under_share <= HEADROOM else "yes" if peak.is_kept else "yes, above kept"
    return (
        peak.row_id, peak.model, peak.device, peak.devices, peak.split, f"{peak.measured:.1f}", f"{peak.priced:.1f}",
        f"{-peak.under_share:+.1%}", f"{-peak.under_of_device:+.1%}", f"{peak.kept:.1f}", verdict,
    )  # fmt: skip


def table(rows: Sequence[tuple[str, ...]], *, markdown: bool) -> str:
    """Return rows of cells under ``HEADER``, as Markdown or as columns of text."""
    if markdown:
        lines = [HEADER, tuple("---" for _ in HEADER), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(row[index]) for row in (HEADER, *rows)) for index in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (HEADER, *rows)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, the rows that are left out, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, help="folder of the published measurements")
    parser.add_argument("--markdown", action="store_true", help="as a table of Markdown")
    arguments = parser.parse_args(argv)
    if not arguments.truth.is_dir():
        parser.error(f"--truth: {arguments.truth} is no folder; give the folder of the published measurements")
    found, left_out = peaks(arguments.truth)
    print(table([cells(peak) for peak in found], markdown=arguments.markdown))
    print("\nGiB. error: of the measured peak; device's: of the device's memory.")
    for reason in sorted(set(left_out.values())):
        print(f"left out: {', '.join(row for row, other in left_out.items() if other == reason)}: {reason}")
    under = [peak for peak in found if peak.under_share > HEADROOM]
    of_device = [peak for peak in found if peak.under_of_device > HEADROOM]
    above = [peak for peak in found if not peak.is_kept]
    print(f"{len(found)} of {len(found) + len(left_out)} rows priced")
    for text, rows in (
        (f"under by more than {HEADROOM:.0%} of the measured peak", under),
        (f"under by more than {HEADROOM:.0%} of the device", of_device),
        ("above what a plan keeps", above),
    ):
        print(f"{text}: {len(rows)} ({', '.join(peak.row_id for peak in rows) or 'none'})")
    return 1 if under else 0


if __name__ == "__main__":
    sys.exit(main())
