"""Refits the constants that ship with the cost model to the calibration sources of published measurements.

    cd benchmarks && python calibrate_from_published.py --truth ../../shared/truth [--check] [--only step]

Kernels and collectives come first, whole steps rest on them. Which sources are used says published/split.toml; each
data file says which rows it was fitted to. With --check nothing is written, and the exit code is 1 where a constant
would move by more than 2 %.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from published import step_fit
from published.toml_text import toml_text

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 0.02
"""Share by which a constant may move before --check complains."""

STEP_HEADER = """Constants of a whole training step: what each means is in step_constants.py. Written by
benchmarks/calibrate_from_published.py on {date}; not to be edited. Shares have no unit, *_s are seconds, *_bytes bytes.
gfx942 is assumed: no training run on it decides a constant. A value at a bound of FITTED
(benchmarks/published/step_fit.py) is not decided by the rows."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One data file and what writes it."""

    name: str
    target: Path
    fit: Callable[[Path], str]


def _gemm(folder: Path) -> str:
    module, fit = importlib.import_module("published.gemm"), importlib.import_module("published.gemm_fit")
    return toml_text(fit.calibrate(folder), module.HEADER)


def _collectives(folder: Path) -> str:
    module = importlib.import_module("published.collectives_fit")
    return str(module.toml_text(module.calibrate(folder)))


def _step(folder: Path) -> str:
    header = STEP_HEADER.format(date=datetime.now(tz=UTC).date().isoformat())
    return toml_text(step_fit.calibrate(folder), header)


PARTS = (
    Part(name="gemm", target=ROOT / "cost_model" / "kernels" / "efficiency.toml", fit=_gemm),
    Part(name="collectives", target=ROOT / "cost_model" / "collectives" / "collectives.toml", fit=_collectives),
    Part(name="step", target=ROOT / "cost_model" / "kernels" / "step_constants.toml", fit=_step),
)


def main() -> int:
    """Refit, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, help="folder of the published measurements")
    parser.add_argument("--check", action="store_true", help="write nothing; say what would move")
    parser.add_argument("--only", choices=[part.name for part in PARTS], help="one of the data files")
    arguments = parser.parse_args()
    moved = 0
    for part in PARTS:
        if arguments.only not in (None, part.name):
            continue
        fitted = part.fit(arguments.truth)
        changes = list(differences(tomllib.loads(part.target.read_text(encoding="utf-8")), tomllib.loads(fitted)))
        print(f"{part.target.name}: {len(changes)} constants move by more than {TOLERANCE:.0%}")
        for name, before, after in changes:
            print(f"  {name}: {before} -> {after}")
        moved += len(changes)
        if not arguments.check:
            part.target.write_text(fitted, encoding="utf-8")
    return 1 if arguments.check and moved else 0


def differences(
    before: Mapping[str, object], after: Mapping[str, object], path: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield (name, before, after) of the numbers that differ by more than TOLERANCE, or that one of the two lacks."""
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
