"""Plain text for the terminal: numbers with three significant digits, folded lines, tables and bars of 80 columns."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

WIDTH = 80
"""Columns of a printed plan."""

BAR = 30
"""Columns of the longest bar."""

_LABEL, _REMARK = 17, 43
"""Columns at which the figure and the remark of a labelled line begin."""

_GAP = "  "
_LEAST = 8
"""Columns that a folded column of a table keeps at least."""


def significant(value: float, digits: int = 3) -> str:
    """Return ``value`` rounded to ``digits`` significant digits, as text with thousands separators."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    rounded = float(f"{value:.{digits - 1}e}")
    exponent = math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(digits - 1 - exponent, 0)}f}"


def duration(seconds: float) -> str:
    """Return ``seconds`` as text in s, ms or µs, with three significant digits."""
    unit, one = time_unit(seconds)
    return f"{significant(seconds / one)} {unit}" if seconds else "0 s"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return (unit, its seconds) in which ``seconds`` is printed."""
    rounded = float(f"{seconds:.2e}")
    return next(((unit, one) for unit, one in (("s", 1.0), ("ms", 1e-3)) if rounded >= one), ("µs", 1e-6))


def size(nbytes: float) -> str:
    """Return ``nbytes`` as text in GB, MB, kB (decimal) or B, with three significant digits."""
    unit, one = size_unit(nbytes)
    return f"{significant(nbytes / one)} {unit}" if one > 1 else f"{nbytes:.0f} B"


def size_unit(nbytes: float) -> tuple[str, float]:
    """Return (unit, its bytes) in which ``nbytes`` is printed."""
    rounded = float(f"{nbytes:.2e}")
    return next(((unit, one) for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if rounded >= one), ("B", 1.0))


def percent(fraction: float) -> str:
    """Return ``fraction`` as percent, below 10 % with one digit after the point where it is not 0."""
    text = f"{100 * fraction:.1f}" if fraction < 0.0995 else f"{100 * fraction:.0f}"
    return f"{text.removesuffix('.0')} %"


def fold(text: str, first: str = "", rest: str | None = None, width: int = WIDTH) -> list[str]:
    """Return ``text`` in lines of at most ``width`` columns.

    Lines break between words; a word that is longer than a line breaks after a dot, a comma, a slash or an underscore,
    if it has one.

    Args:
        text: the text.
        first: beginning of the first line.
        rest: beginning of the other lines; None: as many spaces as ``first`` has columns.
        width: columns of a line.
    """
    rest = " " * len(first) if rest is None else rest
    room = max(width - max(len(first), len(rest)), _LEAST)
    words = " ".join(_breakable(word, room) for word in text.split(" "))
    lines = textwrap.wrap(words, width=room, break_on_hyphens=False) or [""]
    return [f"{first if number == 0 else rest}{line}".rstrip() for number, line in enumerate(lines)]


def _breakable(word: str, room: int) -> str:
    """Return ``word`` with spaces where it has to break to fit into ``room`` columns."""
    if len(word) <= room:
        return word
    lines, line = [], ""
    for part in re.findall(r"[^.,/_]*[.,/_]|[^.,/_]+", word):
        if line and len(line) + len(part) > room:
            lines.append(line)
            line = ""
        line += part
    return " ".join([*lines, line])


def labelled(label: str, figure: str, remark: str = "") -> list[str]:
    """Return a label, a figure and a remark in columns; the remark on a line of its own where it does not fit."""
    head = f"  {label:<{_LABEL - 2}}"
    if not remark:
        return fold(figure, head)
    together = f"{head}{figure:<{_REMARK - _LABEL}}"
    if len(head + figure) < _REMARK - 1 and len(together + remark) <= WIDTH:
        return [together + remark]
    return [*fold(figure, head), *fold(remark, " " * _LABEL)]


def with_band(seconds: float, error: float | None) -> str:
    """Return ``seconds`` as text, with the range that a relative ``error`` leaves; None: without a range."""
    text = duration(seconds)
    if error is None or seconds <= 0:
        return text
    _, one = time_unit(seconds)
    low, high = (significant(seconds * (1 + sign * error) / one) for sign in (-1, 1))
    return f"{text}   ({low} to {high})"


def table(rows: Sequence[Sequence[str]], align: str, *, indent: str = "  ", width: int = WIDTH) -> list[str]:
    """Return rows of cells as lines with aligned columns, at most ``width`` columns wide.

    Where they are wider, the widest columns are folded.

    Args:
        rows: cells; each row has as many as ``align`` has letters.
        align: for each column, "<" left or ">" right.
        indent: beginning of each line.
        width: columns of a line.
    """
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    room = width - len(indent) - len(_GAP) * (len(align) - 1)
    while sum(widths) > room and max(widths) > _LEAST:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in rows:
        cells = [_cell(cell, size_) for cell, size_ in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            texts = (f"{part:{way}{size_}}" for part, way, size_ in zip(parts, align, widths, strict=True))
            lines.append((indent + _GAP.join(texts)).rstrip())
    return lines


def _cell(text: str, width: int) -> list[str]:
    """Return a cell in lines of at most ``width`` columns; an indented cell is indented further from line 2 on."""
    if len(text) <= width:
        return [text]
    lead = " " * (len(text) - len(text.lstrip()))
    return fold(text.strip(), lead, lead * 2, width)


def bars(title: str, amounts: Mapping[str, float], unit: str, one: float, notes: Mapping[str, str]) -> list[str]:
    """Return a bar chart as lines: name, amount and bar of each, under a line with the title and the unit.

    Args:
        title: what the bars show.
        amounts: name -> amount.
        unit: unit that amounts are printed in.
        one: amount of one unit.
        notes: name -> text behind the bar.
    """
    largest = max(amounts.values(), default=0.0)
    digits = max(2 - math.floor(math.log10(largest / one)), 0) if largest > 0 else 0
    texts = {name: f"{amount / one:,.{digits}f}" for name, amount in amounts.items()}
    name_width = max([len(title) - 2, *map(len, amounts)])
    number_width = max([len(unit), *map(len, texts.values())])
    lines = [f"{title:<{name_width + 2}}  {unit:>{number_width}}"]
    for name, amount in amounts.items():
        bar = "#" * max(round(BAR * amount / largest), 1 if amount else 0) if largest else ""
        head = f"  {name:<{name_width}}  {texts[name]:>{number_width}}  {bar}".rstrip()
        note = notes.get(name, "")
        if note and len(head) + 2 + len(note) > WIDTH:
            lines += [head, *fold(note, " " * (name_width + number_width + 6))]
        else:
            lines.append(f"{head}  {note}".rstrip())
    return lines


def printed(show: Callable[[Console], None]) -> str:
    """Return what ``show`` prints on the console that it is given, 160 columns wide, without colours."""
    text = io.StringIO()
    show(Console(file=text, highlight=False, width=160))
    return text.getvalue().rstrip("\n")


def new_table(*columns: str) -> Table:
    """Return an empty table; a column whose name ends in ">" is right-aligned."""
    columns_table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title_justify="left")
    for column in columns:
        columns_table.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left")
    return columns_table
