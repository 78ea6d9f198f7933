"""Errors of the cost model on published measurements: every row, by check, file, device and configuration.

    cd benchmarks && python accuracy.py --truth ../../shared/truth [--json] [--rows OUT.csv] [--plot OUT.png]

Calibration rows and validation rows are separate: constants were fitted to the sources of calibration rows
(published/rows/split.toml).
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

from published.frameworks.defaults import TABLE
from published.pricing import collectives, gemm, memory, runs
from published.pricing.checks import CHECKS, figures, holds, target
from published.rows.priced_row import PricedRow

TAGS = ("gpu", "family", "parallelism", "size", "framework", "precision", "checkpointing", "kind", "nodes")
FEWEST = 3
"""Fewest rows of a group that is shown."""


def price(folder: Path) -> list[PricedRow]:
    """Return the rows of all files of ``folder``, priced or left out with a reason."""
    return [
        *runs.price(folder),
        *memory.price(folder),
        *collectives.price(folder),
        *collectives.price_with_sweep(folder),
        *gemm.price(folder),
    ]


def main() -> int:
    """Price the rows, and print or write tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, help="folder of the published measurements")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--rows", type=Path, help="write one line for each row and quantity to this CSV file")
    parser.add_argument("--plot", type=Path, help="draw predicted against measured into this PNG file")
    arguments = parser.parse_args()
    if not arguments.truth.is_dir():
        parser.error(f"--truth: {arguments.truth} is no folder; give the folder of the published measurements")
    rows = price(arguments.truth)
    if arguments.rows is not None:
        write_rows(rows, arguments.rows)
    if arguments.plot is not None:
        draw(rows, arguments.plot)
    print(json.dumps(summary(rows), indent=1) if arguments.json else text(rows))
    return 0


def summary(rows: list[PricedRow]) -> dict[str, object]:
    """Return the errors by check and file, for calibration and validation separately, as plain data."""
    checks = []
    for check in CHECKS:
        for split in ("validation", "calibration"):
            errors = figures([row for row in rows if row.split == split and check.counts(row)])
            if errors.rows:
                checks.append(
                    {"check": check.number, "name": check.name, "split": split, "target": target(check)}
                    | {"holds": holds(check, errors)} | asdict(errors)
                )  # fmt: skip
    files = {}
    for file, quantity in _tables(rows):
        inside = [row for row in rows if (row.file, row.quantity) == (file, quantity)]
        files[f"{file} {quantity}"] = {
            split: asdict(figures([row for row in inside if row.split == split]))
            for split in ("calibration", "validation")
        } | {"left_out": dict(Counter(row.left_out for row in inside if row.left_out))}
    return {"checks": checks, "files": files}


def text(rows: list[PricedRow]) -> str:
    """Return the tables as text."""
    lines = [
        f"{'check':58} {'split':12} {'rows':>11} {'mean':>7} {'median':>7} {'signed':>7} {'in 15%':>7} {'under':>7}"
    ]
    for check in CHECKS:
        for split in ("validation", "calibration"):
            inside = [row for row in rows if row.split == split and check.counts(row)]
            if inside:
                verdict = ("holds" if holds(check, figures(inside)) else "MISSED") if split == "validation" else ""
                lines.append(_line(f"{check.number} {check.name}", split, inside) + f"  {verdict}")
        lines.append(f"{'':4}target: {target(check)}")
    for file, quantity in _tables(rows):
        inside = [row for row in rows if (row.file, row.quantity) == (file, quantity)]
        lines += ["", f"{file}, {quantity}"]
        for split in ("calibration", "validation"):
            lines.append(_line("  all", split, [row for row in inside if row.split == split]))
        for reason, count in Counter(row.left_out for row in inside if row.left_out).most_common():
            lines.append(f"    left out {count:5}  {reason}")
        for tag in TAGS:
            lines += _groups(tag, [row for row in inside if row.split == "validation"])
    lines += ["", "assumed where a column is blank:"]
    lines += [f"  {name:20} {assumed.note}" for name, assumed in TABLE]
    return "\n".join(lines)


def _tables(rows: list[PricedRow]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.file, row.quantity) for row in rows))


def _groups(tag: str, rows: list[PricedRow]) -> list[str]:
    groups: dict[str, list[PricedRow]] = defaultdict(list)
    for row in rows:
        if row.predicted is not None and row.tags.get(tag):
            groups[row.tags[tag]].append(row)
    return [
        _line(f"    {tag} {name}", "validation", group)
        for name, group in sorted(groups.items(), key=lambda item: -len(item[1]))
        if len(group) >= FEWEST
    ]


def _line(name: str, split: str, rows: list[PricedRow]) -> str:
    errors = figures(rows)
    count = f"{errors.priced}/{errors.rows}"
    shares = (errors.mean, errors.median, errors.signed, errors.within_15, errors.worst_under)
    return f"{name:58.58} {split:12} {count:>11} " + " ".join(f"{share:>7.1%}" for share in shares)


def write_rows(rows: list[PricedRow], path: Path) -> None:
    """Write a CSV line per row: quantity, measured, predicted, reason if left out, split, checks, assumptions."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["file", "row_id", "quantity", "measured", "predicted", "left_out", "split", "checks", "assumed"]
        )
        for row in rows:
            predicted = "" if row.predicted is None else f"{row.predicted:.6g}"
            checks = " ".join(map(str, row.checks))
            measured = f"{row.measured:.6g}" if row.measured else ""
            fields = (row.file, row.row_id, row.quantity, measured, predicted, row.left_out or "", row.split, checks)
            writer.writerow([*fields, "; ".join(row.assumed)])


def draw(rows: list[PricedRow], path: Path) -> None:
    """Write a picture of predicted against measured values, with a panel for each file and quantity."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    tables = _tables(rows)
    figure, panels = pyplot.subplots(1, len(tables), figsize=(4.5 * len(tables), 4.5), squeeze=False)
    for panel, (file, quantity) in zip(panels[0], tables, strict=True):
        for split, color in (("calibration", "tab:gray"), ("validation", "tab:blue")):
            shown = [
                row for row in rows
                if (row.file, row.quantity, row.split) == (file, quantity, split) and row.predicted and row.measured
            ]  # fmt: skip
            panel.loglog(
                [row.measured for row in shown], [row.predicted for row in shown], ".", color=color, label=split
            )
        low, high = panel.get_xlim()
        panel.loglog([low, high], [low, high], color="black", linewidth=0.5)
        panel.set(title=f"{file}\n{quantity}", xlabel="measured", ylabel="predicted")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
