"""The result of a search, written as a `ShardingPlan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from planner.graph.trace_module import TracedModule
from planner.plan.estimate import MeshReport, SolverReport
from planner.plan.fingerprint import torch_fingerprint
from planner.plan.job import Checkpointing
from planner.plan.sharding_plan import PlanMesh, ShardingPlan
from planner.run.run_planner import RunPlanner
from planner.run.run_results import Candidate
from planner.search.branch_and_bound import SearchResult
from planner.search.pipeline.stage_planners import PlannedPipeline, listed_blocks
from planner.strategies.local_ops import local_names, opaque_splits
from planner.writing.fqn_entries import decision_entries, fold_names
from planner.writing.notes import with_reallgather_note
from planner.writing.pipeline import pipeline_entries
from planner.writing.token_order import token_order_notes, zigzag_order
from planner.writing.whole_parameters import whole_notes

_SAME = 1e-9
"""Relative difference up to which step times count as equal."""

PIPELINE_NOT_RUN = "a pipeline cannot be run here yet: --executable-only (executable_only=True) plans without."


def write_plan(
    planner: RunPlanner,
    module: TracedModule,
    candidate: Candidate,
    memory_bytes: int,
    report: SolverReport,
    notes: Sequence[str],
) -> ShardingPlan:
    """Return the `ShardingPlan` of ``candidate``, which was found under a cap of ``memory_bytes`` per device."""
    run = candidate.run
    entries = decision_entries(candidate.structure, candidate.decision, module.names)
    notes = [*notes, *whole_notes(candidate.structure, candidate.decision, run.mesh, module.names.parameters)]
    device, reordering = planner.cluster.device, planner.model.reordering
    headroom = planner.job.headroom if memory_bytes == planner.memory_bytes else 0.0
    job = dataclasses.replace(
        planner.job, micro_batches=run.micro_batches, ac=run.ac, memory_bytes=memory_bytes, headroom=headroom
    )
    order = zigzag_order(reordering, candidate.structure, candidate.decision, run, module.names)
    return ShardingPlan(
        mesh=PlanMesh.from_mesh(run.mesh, "cpu" if device.kind == "cpu" else "cuda"),
        **entries.by_field(),
        activation_checkpointing=fold_names(dict(run.grouping.modes), module.names.modules),
        local_ops=local_names(candidate.structure.regions.graph),
        uneven_lengths=tuple(sorted(candidate.structure.regions.graph.rounded.values())),
        opaque_modules=fold_names(opaque_splits(candidate.structure.regions.graph), module.names.modules),
        micro_batches=run.micro_batches,
        zigzag=order,
        estimate=candidate.estimate,
        solver=report,
        job=job,
        cluster=planner.cluster.to_dict(),
        fingerprint={"model": module.fingerprint, "torch": torch_fingerprint()},
        notes=with_reallgather_note([*notes, *token_order_notes(reordering, order)], entries.input_plan, planner.job),
    )


def write_pipeline_plan(
    planner: RunPlanner,
    module: TracedModule,
    pipeline_plan: PlannedPipeline,
    memory_bytes: int,
    report: SolverReport,
    notes: Sequence[str],
) -> ShardingPlan:
    """Return the `ShardingPlan` of a pipeline, which was found under a cap of ``memory_bytes`` per device."""
    text = pipeline_entries(pipeline_plan, listed_blocks(planner), module.names)
    first = write_plan(planner, module, pipeline_plan.stages()[0], memory_bytes, report, [*notes, PIPELINE_NOT_RUN])
    return dataclasses.replace(
        first,
        mesh=PlanMesh.from_mesh(text.mesh, first.mesh.device),
        **text.entries.by_field(),
        activation_checkpointing=dict(text.modes),
        pipeline=text.pipeline,
        estimate=text.estimate,
        notes=with_reallgather_note(first.notes, text.entries.input_plan, first.job),
    )


def solver_report(
    mesh_result: SearchResult[Candidate] | None, pipeline_result: SearchResult[PlannedPipeline] | None, planner: str
) -> SolverReport:
    """Return the report on the best plan of both searches. A pipeline in ``pipeline_result`` is the faster plan."""
    pipeline = None if pipeline_result is None else pipeline_result.plan
    if pipeline is not None:
        solutions = [candidate.solution for _, candidate in pipeline.kinds]
        objective_s = pipeline.step_time_s
        chosen = str(pipeline.pipeline.whole_mesh)
    else:
        assert mesh_result is not None
        assert mesh_result.plan is not None
        solution = mesh_result.plan.solution
        solutions, chosen = [solution], str(mesh_result.plan.run.mesh)
        objective_s = 0.0 if solution is None else solution.objective_s
    searches = [each for each in (mesh_result, pipeline_result) if each is not None]
    plan = mesh_result.plan if pipeline is None and mesh_result is not None else None
    bound_s, gap = bound_and_gap(plan, objective_s, min(each.bound_s for each in searches))
    return SolverReport(
        name=planner,
        status="optimal" if all(each.complete for each in searches) else "time-limit",
        objective_s=objective_s,
        bound_s=bound_s,
        gap=gap,
        time_s=sum(solution.time_s for solution in solutions if solution is not None),
        meshes=_with_outcome([mesh for each in searches for mesh in each.meshes], chosen, pipeline_result is not None),
    )


def bound_and_gap(plan: Candidate | None, objective_s: float, bound_s: float) -> tuple[float, float | None]:
    """Return the lower bound to report for a plan, and its relative gap.

    A plan with mixed checkpointing may be below the bound, which is that of plans that checkpoint all blocks alike. It
    then has no gap.

    Args:
        plan: the plan; None: a pipeline, which never has mixed checkpointing.
        objective_s: seconds of a step.
        bound_s: the search's bound on the seconds of a step.
    """
    is_mixed = plan is not None and Checkpointing.parse(plan.run.ac).first is not None
    if is_mixed and objective_s < bound_s * (1.0 - _SAME):
        return bound_s, None
    bound_s = min(objective_s, bound_s)
    return bound_s, (objective_s - bound_s) / objective_s if objective_s else 0.0


def _with_outcome(meshes: Sequence[MeshReport], chosen: str, again: bool) -> tuple[MeshReport, ...]:
    """Return the mesh reports, with "chosen" only for the mesh ``chosen``; unchanged if there was only one search."""
    if not again:
        return tuple(meshes)
    reports = []
    for mesh in meshes:
        was_chosen = "slower" if mesh.outcome == "chosen" else mesh.outcome
        reports.append(dataclasses.replace(mesh, outcome="chosen" if mesh.mesh == chosen else was_chosen))
    return tuple(reports)
