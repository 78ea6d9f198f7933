"""Names of mesh axes by what they do, for meshes that the search chose; notes where a user's names say otherwise.

Names are labels: they bind no layout, and the same mesh with other names has the same plan.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from cost_model.layouts.layout import MeshSpec
from planner.graph.trace_module import TracedModule
from planner.plan.axis_roles import AxisUse, Role, layout_axis_uses
from planner.plan.estimate import Estimate, SolverReport
from planner.plan.sharding_plan import PlanMesh, ShardingPlan
from planner.run.run_planner import RunPlanner
from planner.run.run_results import Candidate
from planner.search.pipeline.stage_planners import PlannedPipeline, listed_blocks
from planner.writing.fqn_entries import decision_entries
from planner.writing.pipeline import pipeline_entries

_ROLE_OF_NAME: Mapping[str, Role] = {
    "dp": "dp",
    "ddp": "dp",
    "dp_replicate": "dp",
    "fsdp": "fsdp",
    "dp_shard": "fsdp",
    "tp": "tp",
    "cp": "cp",
    "ep": "ep",
    "repeat": "repeat",
}
"""Name of an axis in torchtitan, transformers or accelerate -> its role. Other names say nothing of a role."""

_DOES: Mapping[Role, str] = {
    "dp": "does data parallelism: it splits the batch, and every rank has whole weights",
    "fsdp": "does fully sharded data parallelism (FSDP): {gathered} of {count} kinds of weights are stored in pieces "
    "on it and gathered for compute",
    "tp": "does tensor parallelism: {pieces} of {count} kinds of weights are computed in pieces on it",
    "cp": "does context parallelism: it splits sequences through attention",
    "ep": "does expert parallelism: it splits the experts",
    "repeat": "splits no batch, sequence or weight: its ranks repeat each other's work",
}


def role_names(roles: Sequence[Role]) -> tuple[str, ...]:
    """Return the names of axes with these roles, outermost first: their roles.

    Of several axes of one role the innermost has the plain name. The next is called ``fsdp_outer``, for example, and
    further ones ``fsdp_outer2``, ``fsdp_outer3`` from the inside out.
    """
    names = []
    for index, role in enumerate(roles):
        inside = roles[index + 1 :].count(role)
        suffix = "" if not inside else "_outer" if inside == 1 else f"_outer{inside}"
        names.append(role + suffix)
    return tuple(names)


def layouts_of(planner: RunPlanner, module: TracedModule, candidate: Candidate) -> ShardingPlan:
    """Return the layouts of ``candidate`` as a plan, without price and notes."""
    entries = decision_entries(candidate.structure, candidate.decision, module.names)
    return ShardingPlan(mesh=PlanMesh.from_mesh(candidate.run.mesh), **entries.by_field(), job=planner.job)


def named_by_role(planner: RunPlanner, module: TracedModule, candidate: Candidate) -> Candidate:
    """Return ``candidate`` on the same mesh, with axes named by their roles."""
    return _with_names(candidate, _names(layouts_of(planner, module, candidate)))


def pipeline_named_by_role(
    planner: RunPlanner, module: TracedModule, pipeline_plan: PlannedPipeline
) -> PlannedPipeline:
    """Return ``pipeline_plan`` with the axes of its stages' mesh named by their roles."""
    text = pipeline_entries(pipeline_plan, listed_blocks(planner), module.names)
    plan = ShardingPlan(
        mesh=PlanMesh.from_mesh(text.mesh), **text.entries.by_field(), pipeline=text.pipeline, job=planner.job
    )
    names = _names(plan)
    return dataclasses.replace(
        pipeline_plan,
        pipeline=dataclasses.replace(pipeline_plan.pipeline, mesh=_mesh(pipeline_plan.pipeline.mesh, names)),
        kinds=tuple((kind, _with_names(candidate, names)) for kind, candidate in pipeline_plan.kinds),
    )


def report_on(report: SolverReport, mesh: MeshSpec, named: MeshSpec) -> SolverReport:
    """Return ``report`` with the name ``named`` for the mesh ``mesh``; the other meshes keep the search's names."""

    def renamed(text: str) -> str:
        return str(named) if text == str(mesh) else text

    return dataclasses.replace(
        report,
        meshes=tuple(dataclasses.replace(each, mesh=renamed(each.mesh)) for each in report.meshes),
        fastest_mesh=None if report.fastest_mesh is None else renamed(report.fastest_mesh),
    )


def fastest_by_role(
    planner: RunPlanner, module: TracedModule, report: SolverReport, fastest: Candidate
) -> SolverReport:
    """Return ``report``, which is on another plan than ``fastest``, with the axes of ``fastest`` named by role.

    Where both plans are on one mesh, the report has it under the names of its own plan already.
    """
    if any(
        MeshSpec.parse(each.mesh).shape == fastest.run.mesh.shape for each in report.meshes if each.outcome == "chosen"
    ):
        return report
    return report_on(report, fastest.run.mesh, named_by_role(planner, module, fastest).run.mesh)


def with_name_notes(plan: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` with a note on each axis whose name says another role than it has."""
    return dataclasses.replace(plan, notes=(*_name_notes(plan), *plan.notes))


def _name_notes(plan: ShardingPlan) -> Iterator[str]:
    for use in layout_axis_uses(plan):
        named_role = _ROLE_OF_NAME.get(re.sub(r"_outer\d*$", "", use.axis.lower()))
        if use.size > 1 and named_role is not None and named_role != use.role:
            yield f"axis {use.axis} {_does(use)}."


def _does(use: AxisUse) -> str:
    weights = use.weights.main()
    return _DOES[use.role].format(gathered=len(weights.gathered), pieces=len(weights.pieces), count=weights.count)


def _names(plan: ShardingPlan) -> tuple[str, ...]:
    return role_names([use.role for use in layout_axis_uses(plan)])


def _mesh(mesh: MeshSpec, names: Sequence[str]) -> MeshSpec:
    return MeshSpec(axes=tuple(zip(names, mesh.shape, strict=True)))


def _with_names(candidate: Candidate, names: Sequence[str]) -> Candidate:
    mesh = candidate.run.mesh
    new_name = dict(zip(mesh.names, names, strict=True))
    return dataclasses.replace(
        candidate,
        run=dataclasses.replace(candidate.run, mesh=_mesh(mesh, names)),
        estimate=_with_axes(candidate.estimate, new_name),
    )


def _with_axes(estimate: Estimate, new_name: Mapping[str, str]) -> Estimate:
    """Return ``estimate`` with new names of axes; ``new_name`` has no entry for an axis that keeps its name."""
    collectives = tuple(
        dataclasses.replace(row, axis=",".join(new_name.get(axis, axis) for axis in row.axis.split(",")))
        for row in estimate.collectives
    )
    return dataclasses.replace(estimate, collectives=collectives)
