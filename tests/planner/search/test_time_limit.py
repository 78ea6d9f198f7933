"""A search that is cut short gives the best plan so far, and a gap that holds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from support import families

from planner.errors import JobError, SolverError
from planner.plan.estimate import Estimate, SolverReport
from planner.plan.sharding_plan import ShardingPlan
from planner.run.run_planner import RunPlanner
from planner.search.mesh_search import MeshSearch
from planner.search.mesh_tasks import RelaxedPair, RelaxRun
from planner.search.worker_context import SearchConstraints, WorkerContext
from planner.session import PlanningSession


def session(**options: Any) -> PlanningSession:
    module, inputs = families.make("gpt2", 8)
    return PlanningSession(module, example_inputs=inputs, cluster="1x4xtoy", dtype="fp32", **options)


@functools.cache
def traced_once() -> PlanningSession:
    return session()


def parts(plan: ShardingPlan) -> tuple[Estimate, SolverReport, float]:
    assert plan.estimate is not None
    assert plan.solver is not None
    assert plan.solver.bound_s is not None
    return plan.estimate, plan.solver, plan.solver.bound_s


@pytest.mark.parametrize("relaxations", [0, 1])
def test_what_is_left_is_in_the_gap(monkeypatch: pytest.MonkeyPatch, relaxations: int) -> None:
    """Time is up after so many relaxed runs; the more there were, the better the plan and its bound."""
    planned = traced_once()
    best, report, bound_s = parts(planned.plan(mesh="dp=2,tp=2"))
    assert report.status == "optimal"
    assert report.gap is not None
    assert 0 <= report.gap <= 2 * planned.job.mip_gap

    seen: list[Any] = []
    relax = RelaxRun.__call__

    def counted(self: RelaxRun, context: WorkerContext, constraints: SearchConstraints) -> RelaxedPair:
        seen.append(self)
        return relax(self, context, constraints)

    def is_over(self: MeshSearch) -> bool:
        return self._best is not None and len(seen) >= relaxations

    monkeypatch.setattr(RelaxRun, "__call__", counted)
    monkeypatch.setattr(MeshSearch, "is_over", property(is_over))
    early, cut, early_bound_s = parts(planned.plan(mesh="dp=2,tp=2"))
    assert cut.status == "time-limit"
    assert early.step_time_s >= best.step_time_s * (1 - planned.job.mip_gap)
    # The bound is a linear program's, the step time the estimator's: equal sums in another order.
    assert 0 < early_bound_s <= best.step_time_s * (1 + 1e-12)
    assert early_bound_s <= bound_s * (1 + 2 * planned.job.mip_gap)
    assert cut.gap is not None
    assert cut.objective_s is not None
    assert cut.gap == pytest.approx(1 - early_bound_s / cut.objective_s)


def test_what_the_solver_says_of_a_lack_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not swallowed by the search for a first plan."""

    def out_of_time(*_: Any, **__: Any) -> None:
        raise SolverError("no assignment was found in 0.1 s.", what_to_do="Try again with a larger time limit.")

    monkeypatch.setattr(RunPlanner, "solve", out_of_time)
    with pytest.raises(SolverError, match="larger time limit"):
        session().plan(mesh="dp=2,tp=2")


@pytest.mark.parametrize("mesh", [None, "dp=2,tp=2"])
def test_no_time_at_all(monkeypatch: pytest.MonkeyPatch, mesh: str | None) -> None:
    """Without a first plan nothing goes on after the limit: no mesh is bounded, no run relaxed."""
    planned, relaxed = session(time_limit_s=1e-6), []
    monkeypatch.setattr(RunPlanner, "relax_run", lambda *_, **__: relaxed.append(1))
    with pytest.raises(SolverError):
        planned.plan(mesh=mesh)
    assert not relaxed


@pytest.mark.parametrize("time_limit_s", [0.0, -1.0, float("nan")])
def test_a_limit_is_above_0(time_limit_s: float) -> None:
    with pytest.raises(JobError, match="above 0"):
        session(time_limit_s=time_limit_s)
