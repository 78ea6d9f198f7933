"""The chosen plan with its report: the fastest plan of a search, or a baseline that is simpler and costs the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cost_model.layouts.layout import MeshSpec
from planner.plan.estimate import MeshReport, SolverReport
from planner.pricing.run_spec import PIPELINE_AXIS
from planner.run.run_planner import RunPlanner
from planner.run.run_results import Candidate
from planner.search.baseline_search import PricedBaseline
from planner.search.choice import Choice, Contender, choose
from planner.search.pipeline.stage_planners import PlannedPipeline
from planner.writing.write import bound_and_gap

Fastest = Candidate | PlannedPipeline


def simplest_plan(
    planner: RunPlanner,
    fastest: Fastest,
    baselines: Sequence[PricedBaseline],
    tolerance: float,
    mesh: MeshSpec | None,
    memory_bytes: int | None,
) -> Choice[Fastest]:
    """Return the choice among the fastest plan of the search and the baselines.

    If it is the fastest plan, its parameters are stored alike where that costs no more than the tolerance. A pipeline
    is not priced under the perturbations; it is only compared by its step time.

    Args:
        planner: the planner of runs.
        fastest: the fastest plan.
        baselines: the baselines, the simplest first.
        tolerance: relative step time that a simpler plan may cost more.
        mesh: the user's mesh: only baselines on a mesh of its shape can be chosen, under its names; None: all.
        memory_bytes: cap on the peak per device; None: the fastest plan keeps its storage, as pins may ask for it.
    """
    plans = [baseline.result.plan for baseline in baselines]
    candidates = [plan for plan in plans if plan is not None and (mesh is None or plan.run.mesh.shape == mesh.shape)]
    perturbs = isinstance(fastest, Candidate) and tolerance > 0 and bool(candidates)

    def contender(plan: Candidate) -> Contender[Fastest]:
        axes = sum(size > 1 for size in plan.run.mesh.shape)
        perturbed_s = planner.perturbed_s(plan) if perturbs else {}
        return Contender(plan=plan, step_time_s=plan.estimate.step_time_s, axes=axes, perturbed_s=perturbed_s)

    best: Contender[Fastest]
    if isinstance(fastest, Candidate):
        best = contender(fastest)
    else:
        axes = sum(size > 1 for size in fastest.pipeline.whole_mesh.shape)
        best = Contender(plan=fastest, step_time_s=fastest.step_time_s, axes=axes)
    choice = choose(best, [contender(plan) for plan in candidates], tolerance)
    plan = choice.contender.plan
    if plan is fastest and isinstance(plan, Candidate) and tolerance and memory_bytes is not None:
        limit_s = plan.estimate.step_time_s * (1.0 + tolerance)
        uniform = contender(planner.with_uniform_storage(plan, limit_s=limit_s, memory_bytes=memory_bytes))
        behind = (uniform.perturbed_s[name] > time_s * (1.0 + tolerance) for name, time_s in best.perturbed_s.items())
        return choice if uniform.plan is plan or any(behind) else _replaced(choice, uniform)
    if mesh is None or plan is fastest:
        return choice
    assert isinstance(plan, Candidate)
    renamed = dataclasses.replace(choice.contender, plan=planner.renamed(plan, mesh))
    return dataclasses.replace(choice, contender=renamed)


def _replaced(choice: Choice[Fastest], uniform: Contender[Fastest]) -> Choice[Fastest]:
    """Return the choice of ``uniform`` in place of the fastest plan."""
    is_fastest = uniform.step_time_s <= choice.contender.step_time_s
    return dataclasses.replace(choice, contender=uniform, is_fastest=is_fastest, among=(*choice.among, uniform))


def choice_report(report: SolverReport, fastest: Fastest, choice: Choice[Fastest]) -> SolverReport:
    """Return the report on the chosen plan, whose gap is relative to the same bound as that of the fastest plan.

    Args:
        report: the report on the fastest plan.
        fastest: the fastest plan of the search.
        choice: the choice.
    """
    chosen = choice.contender.plan
    if chosen is fastest or not isinstance(chosen, Candidate):
        return report
    solution, objective_s = chosen.solution, chosen.estimate.step_time_s
    bound_s, gap = bound_and_gap(chosen, objective_s, objective_s if report.bound_s is None else report.bound_s)
    if isinstance(fastest, Candidate):
        fastest_mesh, fastest_s = fastest.run.mesh, fastest.estimate.step_time_s
    else:
        fastest_mesh, fastest_s = fastest.pipeline.whole_mesh, fastest.step_time_s
    if fastest_mesh.shape == chosen.run.mesh.shape:
        fastest_mesh = chosen.run.mesh
    return dataclasses.replace(
        report,
        objective_s=objective_s,
        bound_s=bound_s,
        gap=gap,
        time_s=0.0 if solution is None else solution.time_s,
        meshes=_with_chosen(report.meshes, chosen),
        fastest_s=None if choice.is_fastest else fastest_s,
        fastest_mesh=None if choice.is_fastest else str(fastest_mesh),
        loses_under=choice.loses_under,
    )


def _with_chosen(meshes: Sequence[MeshReport], chosen: Candidate) -> tuple[MeshReport, ...]:
    """Return the outcomes of meshes in which the mesh of ``chosen``, under its own names, is the chosen one."""
    mesh, step_time_s = chosen.run.mesh, chosen.estimate.step_time_s
    reports = []
    for report in meshes:
        spec = MeshSpec.parse(report.mesh)
        if spec.shape == mesh.shape and PIPELINE_AXIS not in spec.names:
            found_s = step_time_s if report.step_time_s is None else report.step_time_s
            report = dataclasses.replace(
                report, mesh=str(mesh), outcome="chosen", step_time_s=min(found_s, step_time_s)
            )
        elif report.outcome == "chosen":
            report = dataclasses.replace(report, outcome="fastest")
        reports.append(report)
    return tuple(reports)
