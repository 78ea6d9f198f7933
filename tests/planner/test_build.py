"""`build_plan` gives plans that run: one that does not is left out, and the next best is given."""

from __future__ import annotations

from typing import Any

import pytest
from support.executor_cases import make_model
from torch import nn

from planner.build import build_plan, verified_plan
from planner.errors import RunError, SolverError
from planner.plan.estimate import Verification
from planner.plan.sharding_plan import ShardingPlan
from planner.pricing.run_spec import Run
from planner.run.baselines import Restriction
from planner.run.run_planner import RunPlanner
from planner.session import PlanningSession
from planner.verification import verify_plan


@pytest.fixture(scope="module")
def session() -> PlanningSession:
    model = make_model("llama").to("meta")
    return PlanningSession(model, cluster="1x4xtoy", batch=8, seq=16, dtype="fp32", ac="none")


@pytest.fixture
def no_local_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no plan have local modules, so that each is verified once."""
    monkeypatch.setattr(verify_plan, "local_modules_of", lambda *unused: {})


def failing_on(shapes: set[tuple[int, ...]], tried: list[ShardingPlan]) -> Any:
    """Return a stand-in for `verification_of`, under which plans on meshes of ``shapes`` do not run."""

    def verification_of(module: nn.Module, plan: ShardingPlan, inputs: object) -> Verification:
        tried.append(plan)
        if plan.mesh.shape in shapes:
            raise RunError("aten.view fails.", module="model.layers.0", op="aten.view([2, 3])")
        return Verification(outcome="as-planned", kinds=1)

    return verification_of


def test_a_plan_is_given_with_its_verification() -> None:
    plan = build_plan(
        make_model("mlp"),
        example_inputs=_mlp_inputs(),
        cluster="1x4xtoy",
        mesh="dp=2,tp=2",
        dtype="fp32",
        micro_batches=1,
        ac="none",
    )
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert plan.verification.kinds > 0
    assert plan.timings["verify_s"] > 0
    assert ShardingPlan.from_dict(plan.to_dict()) == plan


def _mlp_inputs() -> dict[str, Any]:
    from support.executor_cases import make_batch

    return make_batch("mlp")


@pytest.mark.usefixtures("no_local_modules")
def test_a_plan_that_does_not_run_is_left_out(session: PlanningSession, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[ShardingPlan] = []
    best = session.plan()
    run = (best.mesh.shape, best.micro_batches, best.job.ac)
    monkeypatch.setattr(verify_plan, "verification_of", failing_on({run[0]}, tried))
    try:
        plan = verified_plan(session)
    except RunError:  # the next best plans are on this mesh, too
        plan = None
    keys = [(item.mesh.shape, item.micro_batches, item.job.ac) for item in tried]
    assert keys[0] == run
    assert len(set(keys)) == len(keys) > 1
    times = [item.estimate.step_time_s for item in tried if item.estimate is not None]
    assert times == sorted(times)
    assert plan is None or plan.mesh.shape != run[0]


@pytest.mark.usefixtures("no_local_modules")
def test_three_failures_are_an_error_that_names_the_first(
    session: PlanningSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[ShardingPlan] = []
    monkeypatch.setattr(verify_plan, "verification_of", failing_on({(4,), (2, 2)}, tried))
    with pytest.raises(RunError, match=r"no plan was found that runs as planned: 3 plans.*aten\.view fails") as raised:
        verified_plan(session)
    assert raised.value.exit_code == 4
    assert raised.value.module == "model.layers.0"
    assert len(tried) == 6, "the baselines are tried last"


@pytest.mark.usefixtures("no_local_modules")
def test_a_baseline_is_given_with_a_note_where_no_plan_of_the_search_runs(
    session: PlanningSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[ShardingPlan] = []
    fails = failing_on({(4,), (2, 2)}, tried)

    def verification(module: nn.Module, plan: ShardingPlan, inputs: object) -> Verification:
        if plan.solver is not None and plan.solver.name == "ilp":
            fails(module, plan, inputs)
        return Verification(outcome="as-planned")

    monkeypatch.setattr(verify_plan, "verification_of", verification)
    plan = verified_plan(session)
    assert len(tried) == 3
    assert plan.solver is not None
    assert plan.solver.name == "fully-sharded"
    assert any("faster plans were found, and do not run as planned" in note for note in plan.notes)


@pytest.mark.parametrize("planner", ["ilp", "fully-sharded"])
def test_a_baseline_is_given_where_the_search_finds_no_plan_in_time(
    session: PlanningSession, monkeypatch: pytest.MonkeyPatch, planner: str
) -> None:
    """One that was asked for has no other in its place."""
    solve = RunPlanner.solve

    def late(self: RunPlanner, run: Run, restriction: Restriction | None, **limits: Any) -> Any:
        if restriction is None or planner != "ilp":
            raise SolverError("no assignment was found in 0.1 s.", what_to_do="Try again with a larger time limit.")
        return solve(self, run, restriction, **limits)

    monkeypatch.setattr(RunPlanner, "solve", late)
    if planner != "ilp":
        with pytest.raises(SolverError, match="larger time limit"):
            verified_plan(session, planner=planner, mesh="dp=2,tp=2")
        return
    plan = verified_plan(session, mesh="dp=2,tp=2")
    assert plan.solver is not None
    assert plan.solver.name == "fully-sharded"
    (note,) = [note for note in plan.notes if "as the search found none" in note]
    assert note.endswith("no assignment was found in 0.1 s. Try again with a larger time limit.")


@pytest.mark.usefixtures("no_local_modules")
def test_the_only_run_of_a_job_that_fails_is_an_error(
    session: PlanningSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"cluster": "1x4xtoy", "batch": 8, "seq": 16, "dtype": "fp32", "ac": "none", "micro_batches": 1}
    monkeypatch.setattr(verify_plan, "verification_of", failing_on({(2, 2)}, []))
    with pytest.raises(RunError, match="the only plan does"):
        build_plan(make_model("llama").to("meta"), mesh="dp=2,tp=2", **job)


def test_a_plan_is_given_without_local_modules_where_it_does_not_run_with_them(
    session: PlanningSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []

    def verification_of(module: nn.Module, plan: ShardingPlan, inputs: object) -> Verification:
        tried.append(bool(plan.local_modules))
        if plan.local_modules:
            raise RunError("aten.view fails.", module="model.layers.0", op="aten.view([2, 3])")
        return Verification(outcome="as-planned", kinds=1)

    monkeypatch.setattr(verify_plan, "verification_of", verification_of)
    plan = verified_plan(session, planner="fully-sharded", mesh="dp=4")
    assert tried == [True, False]
    assert not plan.local_modules
    assert plan.verification == Verification(outcome="as-planned", kinds=1)
