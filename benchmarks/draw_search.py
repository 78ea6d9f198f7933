"""The picture of the outcomes of `search.py`: seconds by stage and peak memory, by layers, devices and axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from search_cases import STAGES, Outcome

GROUPS = {
    "layers": "layers of Llama-3.1-405B, mesh dp=64,tp=8 given",
    "devices": "devices, Llama-3.1-8B, everything searched",
    "axes": "mesh axes, Llama-3.1-8B on 64 devices",
}


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the picture of every measured group to ``path``."""
    by_group = {group: [item for item in outcomes if item.row.group == group] for group in GROUPS}
    by_group = {group: items for group, items in by_group.items() if items}
    if not by_group:
        raise SystemExit(f"there is nothing to draw: measure one of the groups {', '.join(GROUPS)}")
    figure, panels = plt.subplots(1, len(by_group), figsize=(5.5 * len(by_group), 4.2), squeeze=False)
    for axes, (group, items) in zip(panels[0], by_group.items(), strict=True):
        _panel(axes, group, items)
    panels[0][0].legend(loc="upper left", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, group: str, items: Sequence[Outcome]) -> None:
    """Draw bars of seconds by stage, and dots of peak megabytes on a second axis."""
    labels = [item.row.name.rpartition("-")[2] for item in items]
    base = [0.0] * len(items)
    for index, stage in enumerate(STAGES):
        heights = [item.stages.get(stage, 0.0) for item in items]
        axes.bar(labels, heights, bottom=base, color=f"C{index}", label=stage.removesuffix("_s"))
        base = [low + height for low, height in zip(base, heights, strict=True)]
    rest = [max(item.seconds - below, 0.0) for item, below in zip(items, base, strict=True)]
    axes.bar(labels, rest, bottom=base, color="lightgray", label="other")
    axes.set(xlabel=GROUPS[group], ylabel="seconds")
    memory = axes.twinx()
    memory.plot(labels, [item.peak_mb for item in items], "k.:")
    memory.set(ylabel="peak resident MB (dots)", ylim=(0, None))
