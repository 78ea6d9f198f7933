"""`plan_html`: a plan as Jupyter shows it: its figures, bars for memory and time, and its layouts."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from api.render.text import duration, size
from api.view.colours import colour, part_colour
from api.view.plan_view import plan_view
from planner.plan.sharding_plan import ShardingPlan

_WIDTH, _HEIGHT = 640, 22


def plan_html(plan: ShardingPlan) -> str:
    """Return ``plan`` as HTML without scripts; names of modules and clusters are text in it, whatever they are."""
    return "\n".join(("<div>", *_lines(plan_view(plan)), "</div>"))


def _lines(view: Mapping[str, Any]) -> Iterator[str]:
    yield f"<p><b>{html.escape(view['title'])}</b><br>{html.escape(view['subtitle'])}</p>"
    for warning in view["warnings"]:
        yield f"<p><b>Warning:</b> {html.escape(warning)}</p>"
    if view["headline"]:
        yield _table([(tile["label"], tile["value"], tile["note"]) for tile in view["headline"]])
    yield _table([(f"{axis['name']} = {axis['size']:,}", axis["does"]) for axis in view["axes"]])
    memory, time = view["memory"], view["time"]
    if memory is not None:
        whole = max(memory["capacity_bytes"] or 0, memory["peak_bytes"])
        rows = [(each["label"], each["bytes"], colour("memory", each["role"])) for each in memory["roles"]]
        yield _bar("Memory of a device", rows, whole, size)
    if time is not None:
        parts = [(each["name"], each["seconds"], part_colour(each["name"])) for each in time["parts"]]
        yield _bar("Time of a step", parts, time["step_s"], duration)
    layouts = [(each["name"], ", ".join(each["stored"]), ", ".join(each["computed"])) for each in view["parameters"]]
    if layouts:
        heading = f"Layouts on {', '.join(view['layout_axes'])}"
        table = _table(layouts, ("parameter", "stored", "computed"))
        yield f"<details><summary>{html.escape(heading)}</summary>{table}</details>"


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        inner = "".join(f'<{tag} style="text-align:left">{html.escape(cell)}</{tag}>' for cell in cells)
        return f"<tr>{inner}</tr>"

    first = row(head, "th") if head else ""
    return f"<table>{first}{''.join(row(cells, 'td') for cells in rows)}</table>"


def _bar(title: str, rows: Sequence[tuple[str, float, str]], whole: float, text: Any) -> str:
    """Return a stacked bar as SVG, with a legend that has every amount."""
    if not whole:
        return ""
    rectangles, at = [], 0.0
    for name, amount, fill in rows:
        width = _WIDTH * amount / whole
        title_of = f"<title>{html.escape(name)}: {text(amount)}</title>"
        place = f'x="{at:.1f}" y="0" width="{width:.1f}" height="{_HEIGHT}"'
        rectangles.append(f'<rect {place} fill="{fill}">{title_of}</rect>')
        at += width
    legend = " &nbsp; ".join(
        f'<span style="color:{fill}">&#9632;</span> {html.escape(name)} {text(amount)}' for name, amount, fill in rows
    )
    frame = f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" fill="none" stroke="#888"/>'
    drawing = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{html.escape(title)}">'
    return f"<p>{html.escape(title)}: {text(whole)}<br>{drawing}{''.join(rectangles)}{frame}</svg><br>{legend}</p>"
