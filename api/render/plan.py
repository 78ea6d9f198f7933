"""Plans and verification reports as text and tables for the terminal, with units such as ms and GB."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from api.render.axis_roles import axis_roles
from api.render.techniques import technique_lines
from cost_model.layouts.layout import Layout, format_layout
from planner.plan.axis_roles import weight_layouts
from planner.plan.estimate import MeshReport
from planner.plan.sharding_plan import CollectiveEstimate, Estimate, Job, Pipeline, ShardingPlan, SolverReport

_COLLECTIVES_SHOWN = 12
_BLOCKS = re.compile(r"(.*(?:\*|\{\d+-\d+\})\.)?(.*)")
"""A key of a plan in two groups: the path up to and including its blocks, and the name below them."""
_NAMES_SHOWN = 12
_MESHES_SHOWN = 6
_OUTCOMES = {
    "fastest": "",
    "slower": "",
    "open": "undecided, ",
    "does-not-fit": "does not fit",
    "no-layout": "has no layout",
}
_ROLES = {
    "activations": "saved for the backward pass",
    "recomputed_block": "one block's, made again in the backward pass",
    "allocator": "free blocks of torch's caching allocator that no tensor fits into",
    "context": "CUDA context and NCCL's buffers",
    "transient": "the largest that one op and its communication need",
}
"""Memory role -> explanation, for roles whose names do not say enough."""

_ROLES_OF_A_FORWARD = {"activations": "there at once, at most", "transient": "more that one op works on"}
_NAMES = {"kv_cache": "KV cache"}


def show_plan(plan: ShardingPlan, console: Console) -> None:
    """Print a plan: its axes and weights, its price, its optimality gap, and its notes."""
    console.print(_heading(plan), "", _axes_table(plan), "", _weights_table(plan), sep="\n")
    if plan.pipeline is not None:
        console.print("", _stages_table(plan.pipeline), sep="\n")
    if plan.activation_checkpointing:
        console.print("\nActivation checkpointing: " + _checkpointing(plan.activation_checkpointing))
    if plan.estimate is None:
        console.print("\nNobody has priced this plan: `shardplan estimate MODEL PLAN` does.")
    else:
        step, memory = _step_table(plan.estimate, plan.job, plan.pipeline), _memory_table(plan.estimate, plan.job)
        console.print("", step, "", memory, sep="\n")
        console.print("", _collectives_table(plan.estimate), "", sep="\n")
    if lines := technique_lines(plan):
        console.print(Text("\n".join([*lines, ""])))
    if plan.solver is not None:
        console.print(_solver(plan.solver))
        if plan.solver.meshes:
            console.print(Text(_other_meshes(plan.solver.meshes)))
    if plan.timings:
        stages = ", ".join(f"{name.removesuffix('_s')} {value:.2f} s" for name, value in plan.timings.items())
        console.print(f"Planned in {sum(plan.timings.values()):.2f} s: {stages}")
    for note in plan.notes:
        console.print(Text(f"Note: {note}"))


def show_verification(report: Mapping[str, Any], console: Console) -> None:
    """Print whether the collectives that ran are those of the plan, and the differences."""
    if report["equal"]:
        console.print(f"Verified: the {len(report['expected'])} kinds of collectives that ran are the plan's.")
        return
    console.print("The collectives that ran differ from the plan's:")
    console.print(_rows_table(report["differences"]))


def _heading(plan: ShardingPlan) -> Text:
    job = plan.job
    parts = [f"mesh {plan.mesh}"]
    if plan.cluster:
        device = plan.cluster.get("device")
        name = device.get("name") if isinstance(device, Mapping) else device
        parts.append(f"cluster {plan.cluster.get('nodes', 1)}x{plan.cluster.get('devices_per_node')}x{name}")
    if job.batch is not None:
        pieces = f" in {plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''}"
        parts.append(f"batch {job.batch}" + (pieces if job.phase == "training" else ""))
    if job.seq is not None:
        parts.append(f"{job.seq} tokens in the cache" if job.phase == "decode" else f"seq {job.seq}")
    phase = "forward" if job.phase == "training" else job.phase
    parts += [job.optimizer if job.training else phase, job.dtype]
    return Text(", ".join(parts), style="bold")


def _axes_table(plan: ShardingPlan) -> Table:
    table = new_table("Axis", "Size>", "Does", "How")
    for role in axis_roles(plan):
        table.add_row(role.axis, str(role.size), role.role, "; ".join(role.details))
    return table


def _stages_table(pipeline: Pipeline) -> Table:
    table = new_table("Stage>", "Modules", "Each micro-batch>", "Peak>")
    for index, stage in enumerate(pipeline.stages):
        seconds, nbytes = duration(stage.micro_batch_s), size(stage.peak_memory_bytes)
        table.add_row(str(index), ", ".join(stage.modules), seconds, nbytes)
    return table


def _checkpointing(modes: Mapping[str, str]) -> str:
    return ", ".join(f"{mode} for {pattern}" for pattern, mode in modes.items())


def _weights_table(plan: ShardingPlan) -> RenderableType:
    """Return a table of the weights' stored and compute layouts; weights with equal layouts share a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for key, stored, used in weight_layouts(plan):
        other = "under its tied names" if used is None else "as stored" if used == stored else _layout(used)
        prefix, name = _BLOCKS.fullmatch(key.removesuffix(".weight")).groups("")  # type: ignore[union-attr]
        rows.setdefault((prefix.removesuffix("."), _layout(stored), other), []).append(name)
    for key, value in plan.plan.items():
        if isinstance(value, str):
            rows.setdefault(("", f"Sharder {value}", ""), []).append(key)
    if not rows:
        return Text("No weight is split.")
    axes = ", ".join(plan.layout_mesh.names)
    table = new_table("In", "Weights", f"Stored ({axes})", f"Used ({axes})")
    for (prefix, stored_text, used_text), names in rows.items():
        more = len(names) - _NAMES_SHOWN
        shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        table.add_row(prefix, shown, stored_text, used_text)
    return table


def _layout(layout: Layout) -> str:
    return ", ".join(format_layout(layout))


def _step_table(estimate: Estimate, job: Job, pipeline: Pipeline | None) -> Table:
    table = new_table("Step", "Time>", "Share>", "")
    overlapped_s = max(estimate.communication_s - estimate.exposed_communication_s, 0.0)
    waits = f"{duration(estimate.exposed_communication_s)} of it exposed communication"
    rate = ""
    if job.batch is not None and estimate.step_time_s > 0:
        items, unit = job.items
        rate = f"{items / estimate.step_time_s:,.0f} {unit}/s, "
    rows = {
        "forward": estimate.forward_s,
        "backward": estimate.backward_s,
        "gradient reduction": estimate.grad_reduce_s,
        "optimizer": estimate.optimizer_s,
        **({} if pipeline is None else {"pipeline bubble": pipeline.idle_s}),
    }
    rows = rows if job.training else {"forward": estimate.forward_s}
    for name, value in rows.items():
        share = f"{value / estimate.step_time_s:.1%}" if estimate.step_time_s > 0 else ""
        table.add_row(name, duration(value), share)
    table.add_row("whole step", duration(estimate.step_time_s), "", rate + waits, style="bold")
    table.add_row("", "", "", f"another {duration(overlapped_s)} of communication is overlapped with compute")
    return table


def _memory_table(estimate: Estimate, job: Job) -> Table:
    table = new_table("Memory per device", "Bytes>", "")
    for role, nbytes in sorted(estimate.memory.items(), key=lambda item: -item[1]):
        if nbytes:
            roles = _ROLES if job.training else _ROLES | _ROLES_OF_A_FORWARD
            table.add_row(_NAMES.get(role, role.replace("_", " ")), size(nbytes), roles.get(role, ""))
    table.add_row("peak", size(estimate.peak_memory_bytes), _allowed(job), style="bold")
    return table


def _allowed(job: Job) -> str:
    """Return the cap on the peak as text, with the headroom and the capacity that it follows from."""
    if job.memory_bytes is None:
        return ""
    allowed = f"of {size(job.memory_bytes)} allowed"
    if not job.headroom:
        return allowed
    capacity_bytes = round(job.memory_bytes / (1 - job.headroom))
    return f"{allowed}, {100 * job.headroom:g} % headroom of {size(capacity_bytes)}"


def _collectives_table(estimate: Estimate) -> RenderableType:
    """Return a table of the slowest collectives: one row per kind, axis and phase, and a last row for all others."""
    groups: dict[tuple[str, str, str], list[CollectiveEstimate]] = {}
    for row in estimate.collectives:
        groups.setdefault((row.kind, row.axis, row.phase), []).append(row)
    if not groups:
        return Text("No collectives.")
    table = new_table("Collective", "Axis", "Phase", "Calls>", "Bytes each>", "Time>")
    slowest_first = sorted(groups.items(), key=lambda item: -sum(row.time_s for row in item[1]))
    for (kind, axis, phase), rows in slowest_first[:_COLLECTIVES_SHOWN]:
        table.add_row(kind.replace("_", "-"), axis, phase.replace("_", " "), *_sums(rows))
    rest = [row for _, rows in slowest_first[_COLLECTIVES_SHOWN:] for row in rows]
    if rest:
        table.add_row("all others (--json lists them)", "", "", *_sums(rest))
    return table


def _sums(rows: Sequence[CollectiveEstimate]) -> tuple[str, str, str]:
    """Return the number of calls, the range of sizes and the total time of ``rows``, as text."""
    least, most = min(row.bytes for row in rows), max(row.bytes for row in rows)
    sizes = size(most) if least == most else f"{size(least)} to {size(most)}"
    return str(sum(row.count for row in rows)), sizes, duration(sum(row.time_s for row in rows))


def _solver(solver: SolverReport) -> str:
    if solver.status == "given":
        return f"Planner {solver.name}: nothing was optimised"
    text = f"Planner {solver.name}: {solver.status}"
    if solver.gap is not None:
        text += f", at most {math.ceil(round(solver.gap * 1e4, 6)) / 1e4:.2%} from the best of its search space"
    return f"{text}, solved in {solver.time_s:.2f} s"


def _other_meshes(meshes: Sequence[MeshReport]) -> str:
    """Return why other meshes were not chosen, as text: slower meshes first, by step time; at most six are named."""
    rest = sorted(
        (m for m in meshes if m.outcome != "chosen"),
        key=lambda m: (m.outcome not in ("fastest", "slower"), _shown_s(m)),
    )
    texts = [f"{m.mesh} {_OUTCOMES[m.outcome]}{_time_on(m)}" for m in rest[:_MESHES_SHOWN]]
    if len(rest) > _MESHES_SHOWN:
        texts.append(f"{len(rest) - _MESHES_SHOWN} more (--json lists them)")
    return "Other meshes: " + ", ".join(texts)


def _shown_s(mesh: MeshReport) -> float:
    return mesh.step_time_s or mesh.at_least_s or math.inf


def _time_on(mesh: MeshReport) -> str:
    if mesh.step_time_s is not None:
        return duration(mesh.step_time_s)
    return "" if mesh.at_least_s is None else f"at least {duration(mesh.at_least_s)}"


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = new_table(*names)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in names))
    return table


def new_table(*columns: str) -> Table:
    """Return an empty table; a column whose name ends in ">" is right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title_justify="left")
    for column in columns:
        table.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left")
    return table


def duration(seconds: float) -> str:
    """Return ``seconds`` as text in s, ms or µs."""
    for unit, length_s in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length_s:
            return f"{seconds / length_s:.2f} {unit}"
    return f"{seconds * 1e6:.1f} µs" if seconds else "0 s"


def size(nbytes: int) -> str:
    """Return ``nbytes`` as text in GB, MB, kB (decimal) or B."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= one:
            return f"{nbytes / one:.2f} {unit}"
    return f"{nbytes} B"
