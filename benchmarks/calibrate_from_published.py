"""The fit of the constants that ship with the cost model to the calibration sources of published measurements.

    cd benchmarks && python calibrate_from_published.py --truth ../../shared/truth [--check] [--only step]

Kernels and collectives are fitted first, since whole steps depend on them. ``published/rows/split.toml`` names the
calibration sources; each data file names the rows that it was fitted to. With --check nothing is written, and the exit
code is 1 where a constant would move by more than 2 %, or where a file's header would change.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from published.fit import collectives, gemm, step
from published.fit.toml_text import toml_text

COST_MODEL = Path(__file__).resolve().parent.parent / "cost_model"
TOLERANCE = 0.02
"""Share by which a constant may move before --check complains."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One data file: its path, its header (a template with ``{date}``), and the fit that returns its tables."""

    name: str
    target: Path
    header: str
    fit: Callable[[Path], Mapping[str, object]]


PARTS = (
    Part(name="gemm", target=COST_MODEL / "kernels" / "efficiency.toml", header=gemm.HEADER, fit=gemm.calibrate),
    Part(
        name="collectives",
        target=COST_MODEL / "collectives" / "collectives.toml",
        header=collectives.HEADER,
        fit=collectives.calibrate,
    ),
    Part(name="step", target=COST_MODEL / "kernels" / "step_constants.toml", header=step.HEADER, fit=step.calibrate),
)


def main() -> int:
    """Fit, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, help="folder of the published measurements")
    parser.add_argument("--check", action="store_true", help="write nothing; say what would change")
    parser.add_argument("--only", choices=[part.name for part in PARTS], help="one of the data files")
    arguments = parser.parse_args()
    changed = 0
    for part in PARTS:
        if arguments.only not in (None, part.name):
            continue
        header = part.header.format(date=datetime.now(tz=UTC).date().isoformat())
        after, before = toml_text(part.fit(arguments.truth), header), part.target.read_text(encoding="utf-8")
        moves = list(differences(tomllib.loads(before), tomllib.loads(after)))
        print(f"{part.target.name}: {len(moves)} constants move by more than {TOLERANCE:.0%}")
        for name, old, new in moves:
            print(f"  {name}: {old} -> {new}")
        if header_of(before) != header_of(after):
            print("  the header changes")
            changed += 1
        changed += len(moves)
        if not arguments.check:
            part.target.write_text(after, encoding="utf-8")
    return 1 if arguments.check and changed else 0


def header_of(text: str) -> list[str]:
    """Return the comment lines at the top of a file, without dates."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return [_DATE.sub("", line) for line in lines]


def differences(
    before: Mapping[str, object], after: Mapping[str, object], path: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield (name, before, after) of numbers that differ by more than TOLERANCE, or that only one mapping has."""
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        name = f"{path}.{key}" if path else key
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, name)
        elif isinstance(old, (int, float)) and isinstance(new, (int, float)):
            if abs(new - old) > TOLERANCE * max(abs(old), abs(new)):
                yield name, old, new
        elif isinstance(old, (int, float)) or isinstance(new, (int, float)):
            yield name, old, new


if __name__ == "__main__":
    sys.exit(main())
