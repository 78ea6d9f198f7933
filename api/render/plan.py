"""A plan as text of 80 columns, from the answer down to the details; and the report of a verification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from api.render.comparison import comparison_lines, optimality_lines
from api.render.details import detail_lines, row_lines, stage_lines
from api.render.headline import LOUD_NOTES, assumed, figures, headline, warnings
from api.render.layout_lines import layout_lines
from api.render.mesh_lines import mesh_lines
from api.render.run_cost import cluster_of, device_word
from api.render.techniques import technique_lines
from api.render.text import bars, duration, fold, printed, size_unit, time_unit
from api.requests.run_cost import RunCost
from planner.plan.sharding_plan import Estimate, Job, Pipeline, ShardingPlan

MEMORY_NOTES = {
    "activations": "saved for the backward",
    "recomputed_block": "one block's, made again in the backward",
    "allocator": "free blocks of torch's caching allocator",
    "context": "CUDA context, NCCL's buffers",
    "transient": "the most that one op works on",
}
"""Memory role -> explanation, for roles whose names do not say enough."""

_ROLES_OF_A_FORWARD = {"activations": "there at once, at most"}
_HEADINGS = (
    *("Warning", "Mesh", "Layouts", "Stage", "Memory per", "Time per", "Compared with"),
    *("Axis", "Phase", "Collective "),
)
_NAMES = {"kv_cache": "KV cache", "optimizer_state": "optimizer", "recomputed_block": "recomputed"}


def show_plan(
    plan: ShardingPlan,
    console: Console,
    *,
    details: bool = False,
    cost: RunCost | None = None,
    file: str | None = None,
) -> None:
    """Print a plan.

    Args:
        plan: the plan.
        console: where to print.
        details: whether to print collectives, other meshes, timings and all notes as well.
        cost: a training run whose days and price are printed; None: none.
        file: the plan's file, for the commands to type next; None: it is not saved yet.
    """
    print_lines(plan_lines(plan, details=details, cost=cost, file=file), console)


def print_lines(lines: Sequence[str], console: Console) -> None:
    """Print lines as they are; the first one, headings and warnings in bold, where the console can."""
    for number, line in enumerate(lines):
        style = "bold" if number == 0 or line.startswith(_HEADINGS) else ""
        console.print(Text(line, style=style), soft_wrap=True)


def plan_text(plan: ShardingPlan) -> str:
    """Return a plan as ``print(plan)`` shows it: with the Python to type next, not commands."""
    return "\n".join(_lines(plan, _next_statements(plan)))


def plan_lines(
    plan: ShardingPlan, *, details: bool = False, cost: RunCost | None = None, file: str | None = None
) -> list[str]:
    """Return a plan as lines of at most 80 columns; the arguments are those of `show_plan`."""
    lines = _lines(plan, next_lines(plan, file, details=details), cost)
    return lines + (detail_lines(plan) if details else [])


def _lines(plan: ShardingPlan, following: list[str], cost: RunCost | None = None) -> list[str]:
    loud = warnings(plan)
    parts = [[*headline(plan), *assumed(plan), *loud], figures(plan, cost), mesh_lines(plan), layout_lines(plan)]
    if plan.pipeline is not None:
        parts.append(stage_lines(plan.pipeline))
    if plan.estimate is not None:
        parts += [_memory(plan, plan.estimate), _time(plan.estimate, plan.job, plan.pipeline)]
    parts += [technique_lines(plan), comparison_lines(plan), optimality_lines(plan), following]
    return [line for part in parts if part for line in (*part, "")][:-1]


def _memory(plan: ShardingPlan, estimate: Estimate) -> list[str]:
    ordered = sorted(estimate.memory.items(), key=lambda item: -item[1])
    amounts = {role_label(role): float(nbytes) for role, nbytes in ordered if nbytes}
    if not amounts:
        return []
    roles = MEMORY_NOTES if plan.job.training else MEMORY_NOTES | _ROLES_OF_A_FORWARD
    unit, one = size_unit(max(amounts.values()))
    notes = {role_label(role): text for role, text in roles.items()}
    return bars(f"Memory per {device_word(cluster_of(plan))}", amounts, unit, one, notes)


def role_label(role: str) -> str:
    """Return the name of a role of memory in text."""
    return _NAMES.get(role, role.replace("_", " "))


def _time(estimate: Estimate, job: Job, pipeline: Pipeline | None) -> list[str]:
    exposed_s = min(estimate.exposed_communication_s, estimate.communication_s)
    amounts = {"compute": estimate.compute_s, "communication": estimate.communication_s}
    notes = {}
    if estimate.communication_s > 0:
        overlapped_s = max(estimate.communication_s - exposed_s, 0.0)
        notes["communication"] = _overlap(overlapped_s, exposed_s)
    slowdown_s = estimate.exposed_communication_s - exposed_s
    if slowdown_s > 1e-3 * estimate.step_time_s:
        amounts["slowdown"] = slowdown_s
        notes["slowdown"] = "of kernels by communication"
    if job.training:
        amounts["optimizer"] = estimate.optimizer_s
    if pipeline is not None:
        amounts["bubble"] = pipeline.idle_s
    if not any(amounts.values()):
        return []
    unit, one = time_unit(max(amounts.values()))
    return bars("Time per step", amounts, unit, one, notes)


def _overlap(overlapped_s: float, exposed_s: float) -> str:
    """Return how much communication is overlapped and exposed, as text; what is below 1 % is not named."""
    least_s = 0.01 * (overlapped_s + exposed_s)
    if exposed_s < least_s:
        return "overlapped"
    return (
        "exposed" if overlapped_s < least_s else f"{duration(overlapped_s)} overlapped, {duration(exposed_s)} exposed"
    )


def next_lines(plan: ShardingPlan, file: str | None, *, details: bool) -> list[str]:
    """Return the commands to type next, each with what it does."""
    name, model = file or "plan.json", plan.model or "MODEL"
    lines = [] if file is not None else fold("add -o plan.json to the command", "Save it     ")
    if _runs(plan):
        lines += fold(f"shardplan verify {model} {name}", "Verify it   ")
        cluster = cluster_of(plan)
        nodes, each = (1, plan.mesh.size) if cluster is None else (cluster.nodes, cluster.devices_per_node)
        where = f"--nnodes {nodes} " if nodes > 1 else ""
        lines += fold(f"torchrun {where}--nproc-per-node {each} YOUR_SCRIPT.py", "Run it      ")
        lines += fold("(with executor.shard_module, as the README shows)", " " * 12)
    if not details:
        lines += fold(f"shardplan show {name} --details{_quiet_notes(plan)}", "Details     ")
        lines += fold(f"shardplan report {name} -o plan.html", "Look at it  ")
    return lines


def _next_statements(plan: ShardingPlan) -> list[str]:
    """Return the lines of Python to type next, each with what it does."""
    lines = fold('plan.save("plan.json")', "Save it     ")
    if _runs(plan):
        lines += fold("shard_module(model, device_mesh_for(plan), plan)", "Run it      ")
    lines += fold(f"shardplan show plan.json --details{_quiet_notes(plan)}", "Details     ")
    return lines + fold("shardplan report plan.json -o plan.html", "Look at it  ")


def _runs(plan: ShardingPlan) -> bool:
    return plan.pipeline is None and not plan.job.async_tp


def _quiet_notes(plan: ShardingPlan) -> str:
    """Return how many notes only the details show, as text."""
    quiet = sum(not note.startswith(LOUD_NOTES) for note in plan.notes)
    return f" (and {quiet} note{'s' if quiet > 1 else ''})" if quiet else ""


def verification_text(report: Mapping[str, Any]) -> str:
    """Return what `show_verification` prints."""
    return printed(lambda console: show_verification(report, console))


def show_verification(report: Mapping[str, Any], console: Console) -> None:
    """Print whether the collectives that ran are those of the plan, and the differences."""
    if report["equal"]:
        console.print(f"Verified: the {len(report['expected'])} kinds of collectives that ran are the plan's.")
        return
    console.print("The collectives that ran differ from the plan's:")
    for line in row_lines(report["differences"]):
        console.print(Text(line), soft_wrap=True)
