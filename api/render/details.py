"""What ``--details`` adds to a printed plan: collectives, stages, every layout, other meshes, timings, notes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from api.render.axis_roles import axis_roles
from api.render.layout_lines import layout_lines
from api.render.run_cost import cluster_of
from api.render.text import duration, fold, size, table
from planner.plan.estimate import MeshReport
from planner.plan.sharding_plan import CollectiveEstimate, Estimate, Job, Pipeline, ShardingPlan, SolverReport
from planner.plan.stated_errors import PAGE, stated_error

_COLLECTIVES_SHOWN = 12
_MESHES_SHOWN = 12
_MODULES_SHOWN = 5
_OUTCOMES = {
    "fastest": "",
    "slower": "",
    "open": "undecided, ",
    "does-not-fit": "does not fit",
    "no-layout": "has no layout",
}


def detail_lines(plan: ShardingPlan) -> list[str]:
    """Return the lines of ``--details``."""
    weights = layout_lines(plan, details=True)
    parts = [_axes(plan), [] if weights == layout_lines(plan) else weights]
    if plan.estimate is not None:
        parts += [_phases(plan.estimate, plan.job, plan.pipeline), _collectives(plan.estimate), _error(plan)]
    if plan.solver is not None:
        parts.append(_solver(plan.solver))
    if plan.timings:
        stages = ", ".join(f"{name.removesuffix('_s')} {duration(value)}" for name, value in plan.timings.items())
        parts.append(fold(f"Planned in {duration(sum(plan.timings.values()))}: {stages}"))
    parts.append([line for note in plan.notes for line in fold(note, "Note: ")])
    return [line for part in parts if part for line in ("", *part)]


def stage_lines(pipeline: Pipeline) -> list[str]:
    """Return a table of the pipeline's stages."""
    rows = [("Stage", "modules", "micro-batch", "peak")]
    rows += [
        (f"  {index}", _modules(stage.modules), duration(stage.micro_batch_s), size(stage.peak_memory_bytes))
        for index, stage in enumerate(pipeline.stages)
    ]
    return table(rows, "<<>>", indent="")


def _modules(names: Sequence[str]) -> str:
    """Return the modules of a stage as text; of many, the first ones are named."""
    more = f" and {len(names) - _MODULES_SHOWN} more" if len(names) > _MODULES_SHOWN else ""
    return ", ".join(names[:_MODULES_SHOWN]) + more


def _axes(plan: ShardingPlan) -> list[str]:
    rows = [("Axis", "size", "does", "how")]
    rows += [(f"  {role.axis}", f"{role.size:,}", role.role, "; ".join(role.details)) for role in axis_roles(plan)]
    return table(rows, "<><<", indent="")


def _phases(estimate: Estimate, job: Job, pipeline: Pipeline | None) -> list[str]:
    """Return a table of the seconds of each phase, with the exposed communication in it."""
    phases = {
        "forward": estimate.forward_s,
        "backward": estimate.backward_s,
        "gradient reduction": estimate.grad_reduce_s,
        "optimizer": estimate.optimizer_s,
        **({} if pipeline is None else {"pipeline bubble": pipeline.idle_s}),
    }
    phases = phases if job.training else {"forward": estimate.forward_s}
    step_s = estimate.step_time_s
    rows = [("Phase", "time", "share")]
    rows += [
        (f"  {name}", duration(value), f"{value / step_s:.1%}".replace("%", " %") if step_s > 0 else "")
        for name, value in phases.items()
    ]
    host = [] if estimate.host_s is None else [("  host, in eager mode", duration(estimate.host_s), "")]
    return table(rows + host, "<>>", indent="")


def _collectives(estimate: Estimate) -> list[str]:
    """Return a table of the slowest collectives: one row per kind, axis and phase, and a last row for all others."""
    groups: dict[tuple[str, str, str], list[CollectiveEstimate]] = {}
    for row in estimate.collectives:
        groups.setdefault((row.kind, row.axis, row.phase), []).append(row)
    if not groups:
        return ["No collectives."]
    slowest_first = sorted(groups.items(), key=lambda item: -sum(row.time_s for row in item[1]))
    rows = [("Collective", "axis", "phase", "calls", "bytes each", "time")]
    for (kind, axis, phase), members in slowest_first[:_COLLECTIVES_SHOWN]:
        rows.append((f"  {kind.replace('_', '-')}", axis, phase.replace("_", " "), *_sums(members)))
    rest = [row for _, members in slowest_first[_COLLECTIVES_SHOWN:] for row in members]
    if rest:
        rows.append(("  others (--json)", "", "", *_sums(rest)))
    return table(rows, "<<<>>>", indent="")


def _sums(rows: Sequence[CollectiveEstimate]) -> tuple[str, str, str]:
    """Return the number of calls, the range of sizes and the total time of ``rows``, as text."""
    least, most = min(row.bytes for row in rows), max(row.bytes for row in rows)
    sizes = size(most) if least == most else f"{size(least)} to {size(most)}"
    return f"{sum(row.count for row in rows):,}", sizes, duration(sum(row.time_s for row in rows))


def _error(plan: ShardingPlan) -> list[str]:
    stated = stated_error(plan, cluster_of(plan))
    if stated is None:
        return fold("Error of the step time: not stated, for no such job was compared with measurements.")
    return fold(
        f"Error of the step time: {100 * stated.error:.1f} % on average, on {stated.runs} published training runs "
        f"({PAGE}: {stated.row})."
    )


def _solver(solver: SolverReport) -> list[str]:
    lines = fold(f"Planner {solver.name}: {solver.status}, solved in {duration(solver.time_s)}")
    return lines + fold(_other_meshes(solver.meshes)) if len(solver.meshes) > 1 else lines


def _other_meshes(meshes: Sequence[MeshReport]) -> str:
    """Return why other meshes were not chosen, as text: slower meshes first, by step time."""
    rest = sorted((m for m in meshes if m.outcome != "chosen"), key=lambda m: (m.outcome != "slower", _shown_s(m)))
    texts = [f"{m.mesh} {_OUTCOMES[m.outcome]}{_time_on(m)}" for m in rest[:_MESHES_SHOWN]]
    if len(rest) > _MESHES_SHOWN:
        texts.append(f"{len(rest) - _MESHES_SHOWN} more (--json lists them)")
    return "Other meshes: " + "; ".join(texts)


def _shown_s(mesh: MeshReport) -> float:
    return mesh.step_time_s or mesh.at_least_s or math.inf


def _time_on(mesh: MeshReport) -> str:
    if mesh.step_time_s is not None:
        return duration(mesh.step_time_s)
    return "" if mesh.at_least_s is None else f"at least {duration(mesh.at_least_s)}"


def row_lines(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return mappings with the same keys as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [tuple(str(row.get(name, "")) for name in names) for row in rows]
    return table([tuple(names), *cells], "<" * len(names), indent="")
