"""Published recipes of the frameworks, each checked: does it fit, how fast, and which change would help most?

    PYTHONPATH=.:tests python benchmarks/check_recipes.py [--framework torchtitan] [-o benchmarks/results/recipes.md]

The recipes, their sources, and the clusters that stand in where a source names none, are those of
tests/support/recipes.py. Each is priced by its degrees (``shardplan check --quick``), as the framework's current
release would run it.
"""

from __future__ import annotations

import argparse
import datetime
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.recipes import FOLDER, RECIPES, Recipe

from api.frameworks.changes import Change
from api.frameworks.check import Check, check
from planner.plan.stated_errors import stated_configuration_error

MOST_CELL = 160
"""Most characters of a cell, as in the docs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A recipe and what is found of it."""

    recipe: Recipe
    found: Check

    @property
    def per_device(self) -> float | None:
        """Predicted tokens per second and device; None: it is not priced."""
        return None if self.found.priced is None else self.found.priced.tokens_per_s_per_device

    @property
    def error(self) -> float | None:
        """Relative error of the predicted rate against the measured one; None: one of them is not known."""
        measured, predicted = self.recipe.tokens_per_s, self.per_device
        return None if measured is None or predicted is None else predicted / measured - 1

    @property
    def change(self) -> Change | None:
        """The first change that is named: it saves most a decision, or fits with fewest; None: none helps."""
        return next(iter(self.found.changes), None)

    @property
    def certainty(self) -> str:
        """How sure the gain of the change is, for people; "": it is above the stated error of such prices."""
        has_experts = self.found.priced is not None and self.found.priced.spec.experts is not None
        stated = stated_configuration_error(self.found.cluster, self.found.launch.dtype, has_experts=has_experts)
        if stated is None:
            return "no error is stated"
        gain = None if self.change is None else self.change.gain
        return "" if gain is None or gain > stated.error else "within the error"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the recipes and write the tables; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", help="the recipes of this framework only")
    parser.add_argument("-o", "--output", type=Path, help="write this file; default: standard output")
    options = parser.parse_args(arguments)
    rows = []
    for recipe in RECIPES:
        if options.framework in (None, recipe.framework):
            rows.append(checked(recipe))
            print(recipe.file, file=sys.stderr)
    text = "\n".join(page(rows)) + "\n"
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0


def checked(recipe: Recipe) -> Row:
    """Return a recipe with what is found of it by its degrees."""
    found = check(
        recipe.model_spec,
        recipe.text,
        cluster=recipe.cluster,
        framework=recipe.framework,
        seq=recipe.seq,
        plans=False,
    )
    return Row(recipe=recipe, found=found)


def source_of(recipe: Recipe) -> str:
    """Return where a recipe was published, up to its commit or release."""
    beside = FOLDER / f"{Path(recipe.file).stem}.source"
    text = beside.read_text(encoding="utf-8") if beside.exists() else recipe.text
    lines = text[text.index("Source:") :].splitlines()
    following = [line for line in lines[1:3] if line.startswith("#")]
    joined = " ".join([lines[0], *(line.lstrip("# ") for line in following)])
    match = re.match(r"Source: (.*? @[\w.]+(?: copy)?)", joined)
    return match[1] if match else joined.removeprefix("Source: ")


def page(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# What was found in published recipes"
    yield ""
    command = "PYTHONPATH=.:tests python benchmarks/check_recipes.py -o benchmarks/results/recipes.md"
    yield f"`{command}`, {datetime.date.today().isoformat()}, {len(rows)} recipes."
    yield "What the figures mean, and what is assumed: `docs/frameworks/recipes.md`. Rates are tokens per second and"
    yield "device, predicted from the degrees. The change is the first that `check` names; a gain is of the step time."
    yield from _summary(rows)
    for framework in dict.fromkeys(row.recipe.framework for row in rows):
        yield from ("", f"## {framework}", "")
        yield "| recipe | source | model | devices | seq | fits | predicted | measured | change | gain |"
        yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
        for row in rows:
            if row.recipe.framework == framework:
                yield "| " + " | ".join(_cells(row)) + " |"
    noted = [row for row in rows if row.found.faults or row.found.unpriced or row.found.assumed]
    yield from ("", "## Refused, not priced, assumed", "")
    for row in noted:
        yield f"- `{row.recipe.file}`"
        parts = {"refused": row.found.faults, "not priced": row.found.unpriced, "assumed": row.found.assumed}
        yield from (f"    - {name}: {text}" for name, texts in parts.items() for text in texts)


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    legal = [row for row in rows if not row.found.faults]
    priced = [row for row in legal if row.found.priced is not None]
    missing = [row for row in priced if not row.found.fits]
    helped = [row for row in priced if row.change is not None and row.change.gain is not None]
    certain = [row for row in helped if not row.certainty]
    yield ""
    yield f"- refused: {len(rows) - len(legal)} of {len(rows)}; not priced, as they serve: {len(legal) - len(priced)}"
    yield f"- do not fit: {len(missing)} of {len(priced)}"
    yield f"- fit, and a change saves 1 % or more: {len(helped)} of {len(priced) - len(missing)}; more than the stated"
    yield f"  error of such prices: {len(certain)}"
    for title, kind in (("dense", False), ("with experts", True)):
        errors = [abs(row.error) for row in priced if row.error is not None and _has_experts(row) == kind]
        if errors:
            yield f"- measured, {title}: {len(errors)}, mean absolute error {100 * statistics.mean(errors):.1f} %"


def _has_experts(row: Row) -> bool:
    return row.found.priced is not None and row.found.priced.spec.experts is not None


def _cells(row: Row) -> Iterator[str]:
    recipe, found = row.recipe, row.found
    yield recipe.file
    yield source_of(recipe)
    yield recipe.model if isinstance(recipe.model, str) else str(recipe.model["model_type"])
    yield f"{found.cluster.size:,} {found.cluster.device.name}"
    yield f"{found.seq:,}"
    capacity = found.cluster.memory_bytes / 1e9
    memory = "" if found.priced is None else f", {found.priced.memory.device / 1e9:.1f} of {capacity:.0f} GB"
    yield "refused" if found.faults else "-" if found.fits is None else ("yes" if found.fits else "no") + memory
    yield "-" if row.per_device is None else f"{row.per_device:,.0f}"
    error = "" if row.error is None else f" ({100 * row.error:+.0f} %)"
    yield "-" if recipe.tokens_per_s is None else f"{recipe.tokens_per_s:,.0f}{error}"
    change = row.change
    yield "none" if change is None else _texts(change)
    if change is None:
        yield "-"
    elif change.gain is None:
        yield f"fits, {change.priced.tokens_per_s_per_device:,.0f}"
    else:
        yield f"{100 * change.gain:.0f} %" + (f", {row.certainty}" if row.certainty else "")


def _texts(change: Change) -> str:
    """Return what a change says, as far as a cell has room."""
    for count in range(len(change.texts), 0, -1):
        more = len(change.texts) - count
        text = "; ".join(f"`{each}`" for each in change.texts[:count]) + (f"; and {more} more" if more else "")
        if len(text) <= MOST_CELL:
            break
    return text


if __name__ == "__main__":
    raise SystemExit(main())
