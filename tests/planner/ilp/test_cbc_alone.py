"""Planning where highspy cannot be imported: CBC through pulp solves the same programs."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from support import families
from support.random_problems import problems

from planner.ilp import backends
from planner.ilp.problem import Problem
from planner.ilp.relaxation import relax
from planner.ilp.solve import solve
from planner.session import PlanningSession


@settings(deadline=None, max_examples=10)
@given(problem=problems())
def test_both_solvers_agree(problem: Problem) -> None:
    highs, cbc = (solve(problem, mip_gap=0.0, solver=solver) for solver in ("highs", "cbc"))
    assert (highs is None) == (cbc is None)
    if highs is not None and cbc is not None:
        assert cbc.objective_s == pytest.approx(highs.objective_s, rel=1e-6, abs=1e-15)
        bounds = [relax(problem, solver=solver) for solver in ("highs", "cbc")]
        assert bounds[0] is not None
        assert bounds[1] is not None
        assert bounds[1].bound_s == pytest.approx(bounds[0].bound_s, rel=1e-6, abs=1e-15)


@pytest.mark.slow
def test_a_model_is_planned_with_cbc_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = families.make("llama", 8)

    def step_time_s() -> float:
        session = PlanningSession(module, cluster="4xtoy", example_inputs=inputs, dtype="fp32", micro_batches=1)
        plan = session.plan(mesh="dp=2,tp=2")
        assert plan.estimate is not None
        return plan.estimate.step_time_s

    assert backends.solver_name() == "highs"
    with_highs_s = step_time_s()
    monkeypatch.setitem(sys.modules, "highspy", None)
    assert backends.solver_name() == "cbc"
    assert step_time_s() == pytest.approx(with_highs_s, rel=2e-3)
