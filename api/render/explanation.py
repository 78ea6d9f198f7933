"""Explanations of a parameter's layout, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from api.render.text import duration, new_table, printed, size
from planner.explanation import Alternative, Aspect, Explanation, difference

_ASPECTS: dict[Aspect, str] = {"stored": "Stored as", "computed": "Computed as"}
_PARTS_SHOWN = 2
_NOTICED_S = 1e-7


def explanation_dict(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation as JSON data: seconds and bytes."""
    return {
        "parameter": explanation.parameter,
        "same_layouts": list(explanation.names),
        "plan": {"step_time_s": explanation.plan.step_time_s, "peak_memory_bytes": explanation.plan.peak_memory_bytes},
        "memory_bytes": explanation.memory_bytes,
        "alternatives": [
            {
                "aspect": alternative.aspect,
                "layout": list(alternative.layout),
                "chosen": alternative.chosen,
                "step_time_s": None if alternative.estimate is None else alternative.estimate.step_time_s,
                "peak_memory_bytes": None if alternative.estimate is None else alternative.estimate.peak_memory_bytes,
                "fits": alternative.fits,
                **_difference(alternative, explanation),
            }
            for alternative in explanation.alternatives
        ],
    }


def _difference(alternative: Alternative, explanation: Explanation) -> dict[str, Any]:
    if alternative.estimate is None:
        return {"difference_s": None, "collectives_difference_s": None}
    parts, collectives = difference(alternative.estimate, explanation.plan)
    return {"difference_s": dict(parts), "collectives_difference_s": dict(collectives)}


def explanation_text(explanation: Explanation) -> str:
    """Return what `show_explanation` prints."""
    return printed(lambda console: show_explanation(explanation, console))


def show_explanation(explanation: Explanation, console: Console) -> None:
    """Print a table of a parameter's stored layouts, and one of its compute layouts."""
    shared_count = len(explanation.names) - 1
    shared = f", with {shared_count} more that share its layouts" if shared_count else ""
    console.print(Text(f"{explanation.parameter}{shared}", style="bold"))
    console.print(
        f"the plan takes {duration(explanation.plan.step_time_s)} and {size(explanation.plan.peak_memory_bytes)} "
        f"of {size(explanation.memory_bytes)}; each row is the best plan with that layout, all others chosen anew"
    )
    for aspect, title in _ASPECTS.items():
        console.print("", _table(explanation, aspect, title), sep="\n")


def _table(explanation: Explanation, aspect: Aspect, title: str) -> Table:
    table = new_table(title, "Step>", "Slower by>", "Peak>", "Why")
    for alternative in explanation.alternatives:
        if alternative.aspect == aspect:
            style = "bold" if alternative.chosen else None
            table.add_row(", ".join(alternative.layout), *_cells(alternative, explanation), style=style)
    return table


def _cells(alternative: Alternative, explanation: Explanation) -> tuple[str, str, str, str]:
    if alternative.estimate is None:
        return "-", "-", "-", "nothing around it can run so"
    slower_s = alternative.estimate.step_time_s - explanation.plan.step_time_s
    reason = "the plan's" if alternative.chosen else _reasons(alternative, explanation)
    if not alternative.fits:
        reason = f"does not fit{'; ' + reason if reason else ''}"
    sign = "-" if slower_s < 0 else ""
    return (
        duration(alternative.estimate.step_time_s),
        sign + duration(abs(slower_s)),
        size(alternative.estimate.peak_memory_bytes),
        reason,
    )


def _reasons(alternative: Alternative, explanation: Explanation) -> str:
    """Return, as text, the parts of the step and the collectives whose seconds differ most from the plan's."""
    assert alternative.estimate is not None
    parts, collectives = difference(alternative.estimate, explanation.plan)
    if abs(alternative.estimate.step_time_s - explanation.plan.step_time_s) <= explanation.tolerance_s:
        return "as fast, to the solver's tolerance"
    return "; ".join(text for text in (_signed(parts), _signed(collectives)) if text) or "costs the same"


def _signed(parts: Mapping[str, float]) -> str:
    largest_parts = [(name, s) for name, s in parts.items() if abs(s) > _NOTICED_S][:_PARTS_SHOWN]
    return ", ".join(f"{'+' if s > 0 else '-'}{duration(abs(s))} {name}" for name, s in largest_parts)
