"""Plans on a mesh with fewer axes: neighbouring axes of one role are made one axis, and the plan is solved again."""

from __future__ import annotations

import dataclasses

from cost_model.layouts.layout import MeshSpec
from planner.errors import SolverError
from planner.graph.trace_module import TracedModule
from planner.plan.axis_roles import layout_axis_uses
from planner.plan.estimate import MeshOutcome, MeshReport, SolverReport
from planner.plan.sharding_plan import ShardingPlan
from planner.run.run_planner import RunPlanner
from planner.run.run_results import Candidate
from planner.search.mesh_space import mesh_of_shape
from planner.search.worker_context import SearchConstraints
from planner.writing.axis_names import layouts_of, named_by_role


def merged_mesh(plan: ShardingPlan) -> MeshSpec | None:
    """Return the plan's mesh with the innermost two neighbouring axes of one role made one, in the search's names.

    The merged axis has the ranks of both, in the same order. None: no two neighbouring axes have one role, or the plan
    has a pipeline.
    """
    roles = [use.role for use in layout_axis_uses(plan)]
    shape = plan.mesh.shape
    if plan.pipeline is not None:
        return None
    for inner in range(len(roles) - 1, 0, -1):
        if roles[inner - 1] == roles[inner]:
            return mesh_of_shape((*shape[: inner - 1], shape[inner - 1] * shape[inner], *shape[inner + 1 :]))
    return None


def with_merged_axes(
    planner: RunPlanner,
    module: TracedModule,
    best: Candidate,
    constraints: SearchConstraints,
    report: SolverReport,
    *,
    tolerance: float,
    deadline: float | None,
) -> tuple[Candidate, SolverReport]:
    """Return the plan with neighbouring axes of one role merged, as far as that costs no more than ``tolerance``.

    Each merged mesh is solved with the micro-batches and the checkpointing of ``best``.

    Args:
        best: the fastest plan.
        report: the report on ``best``. Meshes that it bounds above the limit are not solved.
        tolerance: relative step time that the result may cost more than ``best``; 0: ``best`` is returned.
        deadline: time of `time.perf_counter` at which the solver returns its incumbent; None: no deadline.
    """
    limit_s = best.estimate.step_time_s * (1.0 + tolerance)
    chosen, chosen_report = best, report
    while tolerance > 0:
        mesh = merged_mesh(layouts_of(planner, module, chosen))
        if mesh is None or not _may_take(mesh, limit_s, report):
            break
        run = dataclasses.replace(chosen.run, mesh=mesh, batch_axes=planner.batch_axes(mesh))
        if not constraints.allows(run):
            break
        try:
            merged = planner.solve(
                run,
                constraints.restrict(mesh),
                memory_bytes=constraints.memory_bytes,
                cutoff_s=limit_s,
                deadline=deadline,
            )
        except SolverError:  # no answer in time: the axes stay apart
            break
        if merged is None or merged.estimate.step_time_s > limit_s:
            break
        best_mesh = named_by_role(planner, module, best).run.mesh
        chosen, chosen_report = merged, _report_on(merged, best, best_mesh, report)
    return chosen, chosen_report


def _may_take(mesh: MeshSpec, limit_s: float, report: SolverReport) -> bool:
    """Return whether the search left open that a plan on ``mesh`` takes ``limit_s`` or less."""
    known = next((each for each in report.meshes if each.mesh == str(mesh)), None)
    if known is None:
        return True
    return known.at_least_s is not None and known.at_least_s <= limit_s


def _report_on(merged: Candidate, best: Candidate, best_mesh: MeshSpec, report: SolverReport) -> SolverReport:
    """Return ``report``, which is on ``best``, as the report on ``merged``.

    Args:
        best_mesh: the mesh of ``best``, with axes named by role.
    """
    assert merged.solution is not None
    best_s, merged_s = best.estimate.step_time_s, merged.estimate.step_time_s
    objective_s, bound_s = merged.solution.objective_s, report.bound_s
    return dataclasses.replace(
        report,
        objective_s=objective_s,
        gap=None if bound_s is None else max(objective_s - bound_s, 0.0) / objective_s,
        time_s=report.time_s + merged.solution.time_s,
        meshes=tuple(_outcome(each, merged, best, best_mesh) for each in report.meshes),
        fastest_s=best_s if best_s < merged_s else None,
        fastest_mesh=str(best_mesh) if best_s < merged_s else None,
    )


def _outcome(mesh: MeshReport, merged: Candidate, best: Candidate, best_mesh: MeshSpec) -> MeshReport:
    """Return what a report says of ``mesh`` once ``merged`` is the chosen plan."""
    best_s, merged_s = best.estimate.step_time_s, merged.estimate.step_time_s
    if mesh.mesh == str(merged.run.mesh):
        return dataclasses.replace(mesh, outcome="chosen", step_time_s=merged_s)
    if mesh.mesh == str(best.run.mesh):
        outcome: MeshOutcome = "fastest" if best_s < merged_s else "slower"
        return dataclasses.replace(mesh, mesh=str(best_mesh), outcome=outcome)
    return mesh
