"""The differences of two plans as tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from api.render.plan_diff import Change, PlanDiff
from api.render.text import duration, new_table, size

_LAYOUTS_SHOWN = 40


def show_diff(differences: PlanDiff, console: Console) -> None:
    """Print one table for each kind of difference."""
    if differences.equal:
        console.print("The plans are equal.")
        return
    blocks = [
        _table("Setting", differences.settings, _plain),
        _numbers("Time", differences.seconds, duration),
        _numbers("Memory per device", differences.nbytes, size),
        _table("Layout", differences.layouts[:_LAYOUTS_SHOWN], _plain),
    ]
    for table in blocks:
        if table.row_count:
            console.print(table, "", sep="\n")
    more = len(differences.layouts) - _LAYOUTS_SHOWN
    if more > 0:
        console.print(f"and {more} more layout{'s' if more > 1 else ''} (--json lists all)")


def _table(title: str, changes: Sequence[Change], text: Callable[[Any], str]) -> Table:
    table = new_table(title, "First", "Second")
    for change in changes:
        name = f"{change.field} {change.key}".strip()
        table.add_row(name, text(change.left), text(change.right))
    return table


def _numbers(title: str, changes: Sequence[Change], text: Callable[[Any], str]) -> Table:
    table = new_table(title, "First>", "Second>", "Change>")
    for change in changes:
        left, right = change.left or 0, change.right or 0
        share = f"{right / left - 1:+.1%}" if left else "new"
        name = change.key.removesuffix("_s").replace("_", " ")
        table.add_row(name, text(left), text(right), share)
    return table


def _plain(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
