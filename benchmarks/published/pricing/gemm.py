"""The rows of gemm.csv with their predicted rates or times.

    cd benchmarks && python -m published.pricing.gemm --truth ../../shared/truth [--all]

The script prints the errors of check 8 (GEMMs whose dimensions are all 4096 or more, FlashAttention and cuDNN) and of
all other rows, by split and source.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

from cost_model.hardware.cluster import ClusterError
from cost_model.kernels.compute import elementwise_time_s
from cost_model.kernels.efficiency import shipped_efficiency
from published.rows.gemm import (
    OutOfScopeError,
    attention_case,
    device_of,
    gemm_row_time_s,
    grouped_row_time_s,
    shape_of,
)
from published.rows.priced_row import PricedRow, Quantity, number, read

FILE = "gemm.csv"
_LARGE = 4096
_FIGURES = ("mean", "median", "signed")


def price(folder: Path) -> list[PricedRow]:
    """Return every row of gemm.csv, priced with the shipped constants or left out with a reason."""
    return [_price_row(row) for row in read(folder, FILE)]


def _price_row(row: dict[str, str]) -> PricedRow:
    quantity: Quantity = "tflops" if number(row, "tflops") else "time_us"
    measured = number(row, "tflops") or 1e3 * (number(row, "time_ms") or 0.0)
    tags = {"gpu": row["gpu"], "kind": row["kind"], "op": row["op"], "trust": row["trust"], "precision": row["dtype"]}
    predicted, left_out, assumed = None, None, None
    try:
        if not measured:
            raise OutOfScopeError("neither TFLOP/s nor a time is given")
        device, assumed = device_of(row)
        flops, seconds = _flops_and_seconds(row)
        predicted = flops / seconds / 1e12 if quantity == "tflops" else seconds * 1e6
        in_check = device.kind == "cuda" and row["trust"] in ("A", "B") and _counts(row)
    except (OutOfScopeError, ClusterError) as error:
        left_out, in_check = str(error), False
    return PricedRow(
        file=FILE,
        row_id=row["row_id"],
        quantity=quantity,
        source=row["source"],
        measured=measured,
        predicted=predicted,
        left_out=left_out,
        tags=tags,
        checks=(8,) if in_check else (),
        assumed=(assumed,) if assumed else (),
    )


def _flops_and_seconds(row: dict[str, str]) -> tuple[float, float]:
    device = device_of(row)[0]
    if row["kind"] == "attention":
        case = attention_case(row)
        return case.flops, case.time_s(device, shipped_efficiency())
    if row["kind"] == "gemm":
        m, n, k = shape_of(row)
        return 2.0 * m * n * k, gemm_row_time_s(row, device)
    if row["kind"] == "grouped gemm":
        return grouped_row_time_s(row, device)
    if row["kind"] == "memory-bound kernel":
        rows, _, columns = row["shape"].partition("x")
        numel = int(rows) * int(columns)
        read_s = elementwise_time_s(numel=numel, reads=1, writes=0, dtype="bf16", device=device)
        return 0.0, read_s + elementwise_time_s(numel=numel, reads=0, writes=1, dtype="fp8", device=device)
    reasons = {
        "layer": "a layer with its communication: the step's model prices it",
        "moe layer": "a layer with its dispatch: the step's model prices it",
        "in-step": "measured inside a step, with its power and stalls: no kernel alone",
    }
    raise OutOfScopeError(reasons.get(row["kind"], f"no model of kind {row['kind']!r}"))


def _counts(row: dict[str, str]) -> bool:
    """Return whether check 8 counts the row: FlashAttention, cuDNN, and GEMMs with all of m, n, k 4096 or more."""
    if row["kind"] == "attention":
        return row["op"].startswith(("FlashAttention", "cuDNN"))
    return row["kind"] == "gemm" and min(shape_of(row)) >= _LARGE


def main() -> None:
    """Print errors by split and source, the rows of check 8 first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=Path, required=True, help="folder that holds gemm.csv")
    parser.add_argument("--all", action="store_true", help="print every row")
    arguments = parser.parse_args()
    priced = price(arguments.truth)
    for split in ("calibration", "validation"):
        inside = [row for row in priced if row.split == split and row.predicted is not None]
        _print_errors(f"{split}, check 8", [row for row in inside if row.checks])
        groups: dict[tuple[bool, str], list[PricedRow]] = defaultdict(list)
        for row in inside:
            groups[bool(row.checks), f"{row.source[-58:]} {row.tags['kind']} {row.tags['op'][:24]}"].append(row)
        for (counts, name), rows in sorted(groups.items(), reverse=True):
            _print_errors(f"  {'8' if counts else ' '} {name}", rows)
    reasons: dict[str, int] = defaultdict(int)
    for row in priced:
        if row.left_out is not None:
            reasons[row.left_out] += 1
    print("left out:", *(f"  {count} {reason}" for reason, count in reasons.items()), sep="\n")
    if arguments.all:
        for row in priced:
            if row.predicted is not None:
                print(
                    row.row_id, row.split, row.tags["op"], row.measured, f"{row.predicted:.4g} {100 * row.error:+.1f} %"
                )


def _print_errors(name: str, rows: list[PricedRow]) -> None:
    if rows:
        errors = [row.error for row in rows]
        absolute = [abs(error) for error in errors]
        figures = [100 * mean(absolute), 100 * median(absolute), 100 * mean(errors)]
        text = "  ".join(f"{label} {value:+6.1f} %" for label, value in zip(_FIGURES, figures, strict=True))
        print(f"{name:96s} {len(rows):4d} rows  {text}")


if __name__ == "__main__":
    main()
