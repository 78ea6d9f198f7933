"""Plans and reports for a person, in the terminal. Here seconds and bytes become ms and GB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from api.axis_roles import axis_roles
from planner.plan import Estimate, ShardingPlan, SolverReport


def show_plan(plan: ShardingPlan, console: Console) -> None:
    """Print what a person wants to know of a plan: its axes, its price, how good it is, and its notes."""
    console.print(_heading(plan), "", _axes_table(plan), "", sep="\n")
    if plan.activation_checkpointing:
        console.print("Activation checkpointing: " + _checkpointing(plan.activation_checkpointing))
    if plan.estimate is None:
        console.print("Nobody has priced this plan: `shardplan estimate MODEL PLAN` does.")
    else:
        console.print("", _estimate(plan.estimate), "", _collectives_table(plan.estimate), "", sep="\n")
    if plan.solver is not None:
        console.print(_solver(plan.solver))
    if plan.timings:
        console.print(
            "Planned in "
            + ", ".join(f"{name.removesuffix('_s')} {value:.2f} s" for name, value in plan.timings.items())
        )
    for note in plan.notes:
        console.print(Text(f"Note: {note}"))


def show_verification(report: Mapping[str, Any], console: Console) -> None:
    """Print whether the collectives that ran are those of the plan, and where they are not."""
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
        parts.append(f"batch {job.batch} in {plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''}")
    if job.seq is not None:
        parts.append(f"seq {job.seq}")
    parts += [job.optimizer if job.training else "inference", job.dtype]
    return Text(", ".join(parts), style="bold")


def _axes_table(plan: ShardingPlan) -> Table:
    table = _table("Axis", "Size>", "Does", "How")
    for role in axis_roles(plan):
        table.add_row(role.axis, str(role.size), role.role, "; ".join(role.details))
    return table


def _checkpointing(modes: Mapping[str, str]) -> str:
    return ", ".join(f"{mode} for {pattern}" for pattern, mode in modes.items())


def _estimate(estimate: Estimate) -> RenderableType:
    step = _table("Step", "Time>")
    rows = {
        "forward": estimate.forward_s,
        "backward": estimate.backward_s,
        "gradient reduction": estimate.grad_reduce_s,
        "optimizer": estimate.optimizer_s,
    }
    for name, value in rows.items():
        step.add_row(name, milliseconds(value))
    step.add_row("whole step", milliseconds(estimate.step_time_s), style="bold")
    step.add_row("of it, communication that computing does not hide", milliseconds(estimate.exposed_communication_s))

    memory = _table("Memory per device", "Bytes>")
    for role, nbytes in sorted(estimate.memory.items(), key=lambda item: -item[1]):
        memory.add_row(role.replace("_", " "), gigabytes(nbytes))
    memory.add_row("peak", gigabytes(estimate.peak_memory_bytes), style="bold")
    return Group(step, "", memory)


def _collectives_table(estimate: Estimate) -> RenderableType:
    if not estimate.collectives:
        return Text("No collectives.")
    table = _table("Collective", "Axis", "Phase", "Count>", "Bytes each>", "Time>")
    for row in sorted(estimate.collectives, key=lambda row: -row.time_s):
        phase = row.phase.replace("_", " ")
        table.add_row(
            row.kind.replace("_", "-"), row.axis, phase, str(row.count), gigabytes(row.bytes), milliseconds(row.time_s)
        )
    return table


def _solver(solver: SolverReport) -> str:
    text = f"{solver.name}: {solver.status}"
    if solver.gap is not None:
        text += f", at most {solver.gap:.2%} from the best of its search space"
    return f"{text}, solved in {solver.time_s:.2f} s"


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = _table(*names)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in names))
    return table


def _table(*columns: str) -> Table:
    """Return an empty table; a column whose name ends in ">" is set to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title_justify="left")
    for column in columns:
        table.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left")
    return table


def milliseconds(seconds: float) -> str:
    """Return seconds as text in the unit that a person reads."""
    if seconds >= 10:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:.1f} µs"


def gigabytes(nbytes: int) -> str:
    """Return bytes as text in the decimal unit that a person reads."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
