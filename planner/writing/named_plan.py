"""`named_plan`: a plan of the search as a `ShardingPlan`, with its axes named by what they do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from planner.graph.trace_module import TracedModule
from planner.plan.estimate import SolverReport
from planner.plan.sharding_plan import ShardingPlan
from planner.pricing.run_spec import Run
from planner.run.run_planner import RunPlanner
from planner.search.pipeline.stage_planners import PlannedPipeline
from planner.writing.axis_names import named_by_role, pipeline_named_by_role, report_on, with_name_notes
from planner.writing.breakdown import breakdown
from planner.writing.pipeline import pipeline_breakdown
from planner.writing.simplest import Fastest
from planner.writing.write import write_pipeline_plan, write_plan


def named_plan(
    planner: RunPlanner,
    module: TracedModule,
    plan: Fastest,
    *,
    memory_bytes: int,
    report: SolverReport,
    notes_on: Callable[[Run], Sequence[str]],
    keep_names: bool,
) -> ShardingPlan:
    """Return the `ShardingPlan` of a plan of the search.

    Args:
        planner: the planner of runs.
        module: the traced model.
        plan: the plan.
        memory_bytes: cap on the peak per device that it was planned for.
        report: the report on ``plan``.
        notes_on: run -> remarks for the reader, in the run's names of axes.
        keep_names: whether the axes keep their names; otherwise they are named by role. A pipeline's axes are those of
            its stages.
    """
    if isinstance(plan, PlannedPipeline):
        stages = plan if keep_names else pipeline_named_by_role(planner, module, plan)
        report = report_on(report, plan.pipeline.whole_mesh, stages.pipeline.whole_mesh)
        notes = notes_on(stages.stages()[0].run)
        written = write_pipeline_plan(planner, module, stages, memory_bytes, report, notes)
        return with_name_notes(dataclasses.replace(written, breakdown=pipeline_breakdown(planner, module, stages)))
    named = plan if keep_names else named_by_role(planner, module, plan)
    report = report_on(report, plan.run.mesh, named.run.mesh)
    written = write_plan(planner, module, named, memory_bytes, report, notes_on(named.run))
    formulator, structure = planner.formulator(named.run)
    by_parts = breakdown(formulator, structure, named.decision, module.names.modules)
    return with_name_notes(dataclasses.replace(written, breakdown=by_parts))
