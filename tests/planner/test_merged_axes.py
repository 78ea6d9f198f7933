"""Neighbouring axes of one role become one axis, where the plan on one axis costs about the same."""

from __future__ import annotations

from typing import Any

import pytest
from support import families

from cost_model.layouts.layout import MeshSpec, parse_layout
from planner.merged_axes import merged_mesh, with_merged_axes
from planner.plan.estimate import MeshReport, SolverReport
from planner.plan.sharding_plan import PlanMesh, Port, ShardingPlan
from planner.search.worker_context import SearchConstraints
from planner.session import PlanningSession

FSDP = ("S(0)", "R", "S(0)")
"""Placements on one axis: stored, computed, of the inputs."""
DP, TP = ("R", "R", "S(0)"), ("S(1)", "S(1)", "R")


def plan_of(mesh: str, *axes: tuple[str, str, str]) -> ShardingPlan:
    stored, used, inputs = (parse_layout([axis[i] for axis in axes]) for i in range(3))
    return ShardingPlan(
        mesh=PlanMesh.from_mesh(MeshSpec.parse(mesh)),
        plan={"layers.*.q.weight": stored},
        compute_plan={"layers.*.q.weight": used},
        input_plan={"input": Port(layout=inputs)},
    )


@pytest.mark.parametrize(
    ("mesh", "axes", "merged"),
    [
        ("a=4,b=8", (FSDP, FSDP), "dp=32"),
        ("a=4,b=8", (DP, DP), "dp=32"),
        ("a=4,b=8", (DP, FSDP), None),
        ("a=4,b=8", (FSDP, TP), None),
        ("a=2,b=4,c=8", (FSDP, FSDP, TP), "dp=8,tp=8"),
        ("a=2,b=4,c=8", (DP, FSDP, FSDP), "dp=2,tp=32"),
        ("a=2,b=4,c=8", (FSDP, TP, FSDP), None),
        ("a=8", (FSDP,), None),
    ],
)
def test_neighbours_of_one_role_are_merged(
    mesh: str, axes: tuple[tuple[str, str, str], ...], merged: str | None
) -> None:
    found = merged_mesh(plan_of(mesh, *axes))
    assert (None if found is None else str(found)) == merged


@pytest.fixture(scope="module")
def session() -> PlanningSession:
    module, inputs = families.make("mlp", 16)
    options: dict[str, Any] = {"cluster": "2x4xtoy", "dtype": "fp32", "micro_batches": 1, "ac": "none"}
    return PlanningSession(module, example_inputs=inputs, **options)


def merge(session: PlanningSession, tolerance: float, meshes: tuple[MeshReport, ...] = ()) -> Any:
    """Return the data-parallel plan on two axes, the result of merging them, and its report."""
    planner = session._planner
    restrict = session._restrict("data-parallel", session._pins([MeshSpec.parse("dp=2,tp=4")]))
    constraints = SearchConstraints(memory_bytes=planner.memory_bytes, restrict=restrict)
    mesh = MeshSpec.parse("dp=2,tp=4")
    best = planner.solve(planner.run_of(mesh, 1, "none"), restrict(mesh), memory_bytes=planner.memory_bytes)
    assert best is not None
    assert best.solution is not None
    report = SolverReport(
        name="ilp",
        status="optimal",
        objective_s=best.solution.objective_s,
        bound_s=best.solution.bound_s,
        gap=0.0,
        meshes=meshes,
    )
    result = with_merged_axes(planner, session._module, best, constraints, report, tolerance=tolerance, deadline=None)
    return best, *result


def test_two_axes_of_replicas_become_one_if_that_costs_no_more_than_the_tolerance(session: PlanningSession) -> None:
    best, merged, report = merge(session, 1.0)
    assert merged.run.mesh == MeshSpec.parse("dp=8")
    best_s, merged_s = best.estimate.step_time_s, merged.estimate.step_time_s
    assert merged_s <= 2 * best_s
    assert report.objective_s == merged.solution.objective_s
    assert (report.fastest_s, report.fastest_mesh) == (
        (best_s, "dp_outer=2,dp=4") if best_s < merged_s else (None, None)
    )


def test_without_tolerance_nothing_is_merged(session: PlanningSession) -> None:
    best, merged, report = merge(session, 0.0)
    assert merged is best
    assert report.fastest_s is None


def test_a_mesh_that_the_search_bounded_above_the_limit_is_not_solved(session: PlanningSession) -> None:
    best, merged, _ = merge(session, 1.0, (MeshReport(mesh="dp=8", outcome="slower", at_least_s=1e9),))
    assert merged is best
    known = (
        MeshReport(mesh="dp=8", outcome="slower", at_least_s=1e-9),
        MeshReport(mesh="dp=2,tp=4", outcome="chosen", at_least_s=1e-9),
    )
    best, merged, report = merge(session, 1.0, known)
    is_faster = best.estimate.step_time_s < merged.estimate.step_time_s
    assert [(mesh.mesh, mesh.outcome) for mesh in report.meshes] == [
        ("dp=8", "chosen"),
        ("dp_outer=2,dp=4", "fastest" if is_faster else "slower"),
    ]
