"""`write_figures`: the figures of a plan as PNG or SVG files, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from api.render.plan import role_label
from api.render.text import duration, size
from api.view.colours import colour, part_colour
from api.view.plan_view import plan_view
from planner.errors import PlanError
from planner.plan.sharding_plan import ShardingPlan

FORMATS = ("png", "svg")


def write_figures(plan: ShardingPlan, folder: Path, kind: str) -> list[Path]:
    """Write each figure of ``plan`` into ``folder``; return the files.

    Args:
        plan: the plan.
        folder: the folder, which is made where there is none.
        kind: "png" or "svg".

    Raises:
        PlanError: matplotlib is not installed, or the plan is not priced.
        OSError: a file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("Figures need matplotlib.", what_to_do="pip install 'shardplan[notebook]'.") from error
    if plan.estimate is None:
        raise PlanError("The plan is not priced.", what_to_do="Price it: shardplan estimate MODEL PLAN.")
    view = plan_view(plan)
    folder.mkdir(exist_ok=True)
    files = []
    with mpl.rc_context({"svg.fonttype": "none", "font.size": 10.0}):
        for name, height, draw in _figures(view):
            figure = Figure(figsize=(9.0, height), layout="constrained")
            draw(figure.add_subplot(), view)
            figure.suptitle(view["title"], fontsize=11, x=0.01, ha="left")
            file = folder / f"{name}.{kind}"
            figure.savefig(file, format=kind, dpi=150)
            files.append(file)
    return files


def _figures(view: Mapping[str, Any]) -> Iterator[tuple[str, float, Callable[[Any, Mapping[str, Any]], None]]]:
    """Yield (name, height in inches, function that draws) of each figure that a plan has."""
    yield "memory", 1.9, _memory
    yield "time", 1.9, _time
    if view["baselines"]:
        yield "baselines", 1.2 + 0.35 * len(view["baselines"]), _baselines
    if view["memory"]["curve"]:
        yield "memory-over-the-step", 3.2, _curve
    if view["timeline"] is not None:
        yield "timeline", 1.4 + 0.4 * len(view["timeline"]["tracks"]), _timeline


def _memory(axes: Any, view: Mapping[str, Any]) -> None:
    memory = view["memory"]
    rows = [(each["label"], each["bytes"] / 1e9, colour("memory", each["role"])) for each in memory["roles"]]
    _stacked(axes, rows)
    axes.set_xlabel("GB on a device")
    for name, style in (("capacity_bytes", "-"), ("cap_bytes", "--")):
        if memory[name] is not None:
            axes.axvline(memory[name] / 1e9, color="black", linestyle=style, linewidth=1)
    axes.set_title(f"Memory: {size(memory['peak_bytes'])} at the peak; lines: capacity, cap (dashed)", fontsize=10)


def _time(axes: Any, view: Mapping[str, Any]) -> None:
    parts = view["time"]["parts"]
    _stacked(
        axes,
        [(each["name"], each["seconds"], part_colour(each["name"])) for each in parts],
    )
    axes.set_xlabel("seconds of a step")
    hidden = duration(view["time"]["overlapped_s"])
    axes.set_title(f"Step: {duration(view['time']['step_s'])}; {hidden} more of communication overlapped", fontsize=10)


def _stacked(axes: Any, rows: Sequence[tuple[str, float, str]]) -> None:
    left = 0.0
    for name, amount, fill in rows:
        axes.barh([0], [amount], left=[left], color=fill, edgecolor="white", linewidth=0.5, label=name)
        left += amount
    axes.set_yticks([])
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize=8, frameon=False)


def _baselines(axes: Any, view: Mapping[str, Any]) -> None:
    rows = [("this plan", view["time"]["step_s"], "")]
    rows += [(f"{each['title']}  {each['mesh']}", each["step_s"], each["verdict"]) for each in view["baselines"]]
    for number, (_, seconds, verdict) in enumerate(rows):
        if seconds is None:
            axes.text(0, number, f" {verdict}", va="center", fontsize=8)
        else:
            axes.plot([seconds], [number], "o", color=colour("axis", "dp"))
            axes.annotate(
                duration(seconds), (seconds, number), (8, 0), textcoords="offset points", va="center", fontsize=8
            )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * max(seconds for _, seconds, _ in rows if seconds is not None))
    axes.set_xlabel("seconds of a step")


def _curve(axes: Any, view: Mapping[str, Any]) -> None:
    curve = view["memory"]["curve"]
    roles = list(dict.fromkeys(role for point in curve for role in point["bytes"]))
    at_s = [point["at_s"] for point in curve]
    amounts = [[max(point["bytes"].get(role, 0), 0) / 1e9 for point in curve] for role in roles]
    axes.stackplot(at_s, amounts, colors=[colour("memory", role) for role in roles], labels=map(role_label, roles))
    axes.set_xlabel("seconds of a step")
    axes.set_ylabel("GB on a device")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), fontsize=8, frameon=False)


def _timeline(axes: Any, view: Mapping[str, Any]) -> None:
    timeline = view["timeline"]
    for kind in dict.fromkeys(event[4] for event in timeline["events"]):
        for track in range(len(timeline["tracks"])):
            spans = [(event[1], event[2]) for event in timeline["events"] if event[0] == track and event[4] == kind]
            if spans:
                axes.broken_barh(spans, (track - 0.4, 0.8), color=colour("time", kind), linewidth=0)
        axes.barh([0], [0], color=colour("time", kind), label=kind)
    names = [each["name"] for each in timeline["tracks"]]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("seconds of a step")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), fontsize=8, frameon=False)
