"""The layouts of a printed plan: how weights are stored and computed with; weights with equal layouts share a row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from api.render.text import table
from cost_model.layouts.layout import Layout, format_layout, sharded_dim
from planner.plan.axis_roles import weight_layouts
from planner.plan.sharding_plan import ShardingPlan

_BLOCKS = re.compile(r"((?:.*\.)?(?:\*|\{\d+-\d+\}|\d+)\.)?(.*)")
"""A key of a plan in two groups: the path up to and including its blocks, and the name below them."""

_NAMES_SHOWN = 6
"""The most weights that a row names; further ones are counted."""

Row = tuple[str, str, str]
"""(weights, stored layout, layout in compute)"""


def layout_lines(plan: ShardingPlan, *, details: bool = False) -> list[str]:
    """Return the lines under the heading "Layouts"; with ``details``, every weight is named."""
    rows = _rows(plan, len(plan.plan) if details else _NAMES_SHOWN)
    if not rows:
        return ["Layouts", "  no weight is split"]
    return table([("Layouts", "stored", "computed"), *(("  " + name, *rest) for name, *rest in rows)], "<<<", indent="")


def _rows(plan: ShardingPlan, most_names: int) -> list[Row]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    layouts_of: dict[str, set[tuple[str, str]]] = {}
    for key, stored, used in weight_layouts(plan):
        prefix, name = _BLOCKS.fullmatch(key.removesuffix(".weight")).groups("")  # type: ignore[union-attr]
        prefix = prefix.removesuffix(".")
        layouts = (_stored(plan, stored), _computed(plan, key, stored, used))
        groups.setdefault((prefix, *layouts), []).append(name)
        layouts_of.setdefault(prefix, set()).add(layouts)
    uniform: dict[tuple[str, str], list[str]] = {}
    rows: list[Row] = []
    short = _short_names([name for (prefix, *_), names in groups.items() if prefix for name in names])
    for (prefix, stored_text, used_text), names in groups.items():
        is_whole = len(layouts_of[prefix]) == 1 and not any(_overlap(prefix, other) for other in layouts_of)
        if prefix and len(names) > 1 and is_whole:
            uniform.setdefault((stored_text, used_text), []).append(prefix)
        elif prefix:
            shown = _listed([short.get(name, name) for name in names], most_names)
            rows.append((f"{prefix}: {shown}", stored_text, used_text))
    blocks = [(f"{_listed(prefixes, most_names)} (all weights)", *layouts) for layouts, prefixes in uniform.items()]
    outside = [(_listed(names, most_names), *layouts) for (prefix, *layouts), names in groups.items() if not prefix]
    sharders = [(key, f"Sharder {value}", "") for key, value in plan.plan.items() if isinstance(value, str)]
    return [*blocks, *rows, *outside, *sharders]  # type: ignore[list-item]


def _overlap(prefix: str, other: str) -> bool:
    """Return whether two different paths, such as layers.* and layers.0, share blocks."""
    if prefix == other:
        return False
    (one, first, last), (two, start, end) = _numbered(prefix), _numbered(other)
    return one == two and first <= end and start <= last


def _numbered(prefix: str) -> tuple[str, float, float]:
    """Return the path of a list of blocks, and the first and the last of its blocks that ``prefix`` names."""
    path, _, blocks = prefix.rpartition(".")
    first, _, last = blocks.strip("{}").partition("-")
    return (path, 0, inf) if not first.isdecimal() else (path, int(first), int(last or first))


def _listed(names: Sequence[str], most: int) -> str:
    """Return ``names`` as text; beyond ``most``, they are counted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Return name -> its last part, for the names whose last part no other name has."""
    last = {name: name.rpartition(".")[2] for name in names}
    counts = Counter(last[name] for name in set(names))
    return {name: part for name, part in last.items() if counts[part] == 1}


def _stored(plan: ShardingPlan, stored: Layout) -> str:
    parts = [_placement(axis, place) for axis, place in zip(plan.layout_mesh.names, stored, strict=True)]
    return ", ".join(filter(None, parts)) or "whole"


def _placement(axis: str, place: Placement) -> str:
    """Return how ``axis`` splits a tensor, as text such as "fsdp dim 0"; "" where it does not."""
    if isinstance(place, Replicate):
        return ""
    dim = sharded_dim(place)
    if dim is None:
        return f"{axis} {format_layout((place,))[0]}"
    return f"{axis} dim {dim}" + ("" if format_layout((place,))[0] == f"S({dim})" else ", strided")


def _computed(plan: ShardingPlan, key: str, stored: Layout, used: Layout | None) -> str:
    if used is None:
        return "as its tied names"
    parts, gathered = [], []
    for axis, before, after in zip(plan.layout_mesh.names, stored, used, strict=True):
        if before != after and isinstance(after, Replicate):
            gathered.append(axis)
        elif not isinstance(after, Replicate):
            parts.append(_placement(axis, after))
    if gathered:
        per_block = " per block" if _in_block_group(plan.fully_shard, key) else ""
        over = "" if len(gathered) == len(plan.layout_mesh.names) else f" over {', '.join(gathered)}"
        parts.append(f"gathered{over}{per_block}")
    return ", ".join(parts) or "whole"


def _in_block_group(groups: Mapping[str, tuple[str, ...]], key: str) -> bool:
    """Return whether a weight is in an FSDP group of a block, and is all-gathered with the block's other weights."""
    return any(
        len(names) > 1 and re.search(r"(^|\.)(\*|\d+|\{\d+-\d+\})$", module) is not None
        for module, names in groups.items()
        if any(f"{module}.{name}" == key for name in names)
    )
