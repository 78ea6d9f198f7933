"""A refusal: its least memory is that of a plan, its bound holds, and its advice has nothing that the job has."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from support import families

from planner.errors import InfeasibleError
from planner.plan.sharding_plan import ShardingPlan
from planner.search import infeasibility
from planner.search.infeasibility import find_infeasible
from planner.search.least_memory import LeastMemoryResult, LeastMemorySearch, all_runs
from planner.search.mesh_space import modes_of
from planner.search.worker_context import SearchConstraints
from planner.session import PlanningSession

TINY_GB = 1e-6


def session_of(family: str, **options: Any) -> PlanningSession:
    module, inputs = families.make(family, 8)
    return PlanningSession(module, example_inputs=inputs, dtype="fp32", **{"cluster": "1x4xtoy", **options})


def refusal_of(session: PlanningSession, **options: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        session.plan(**options)
    return caught.value


def peak(plan: ShardingPlan) -> int:
    assert plan.estimate is not None
    return plan.estimate.peak_memory_bytes


@pytest.fixture(scope="module")
def gpt2() -> PlanningSession:
    return session_of("gpt2", memory_gb=TINY_GB)


def test_the_least_memory_is_that_of_a_plan_and_the_bound_holds(gpt2: PlanningSession) -> None:
    error = refusal_of(gpt2)
    assert error.least_bytes is not None
    plan = gpt2.plan(memory_bytes=error.least_bytes)
    assert peak(plan) <= error.least_bytes
    bound_bytes = error.bound_bytes or error.least_bytes * 0.99
    assert gpt2.plan_if_any(memory_bytes=int(bound_bytes) - 1) is None


def test_without_time_the_report_has_a_plan_and_an_honest_bound(gpt2: PlanningSession) -> None:
    planner, modes = gpt2._planner, modes_of(gpt2._analysis, None)
    runs = all_runs(planner, gpt2._meshes(None, "ilp"), gpt2._counts, modes)
    search = LeastMemorySearch(planner, lambda mesh: None, gap=0.0, deadline=time.perf_counter())
    hasty, exact = search.run(runs), LeastMemorySearch(planner, lambda mesh: None).run(runs)
    assert hasty.least is not None
    assert exact.least is not None
    assert exact.is_within(2e-4)
    assert hasty.bound_bytes <= exact.least.nbytes * (1 + 1e-6) <= hasty.least.nbytes * (1 + 2e-4)


def test_what_parameters_and_states_exceed_is_refused_without_a_search(gpt2: PlanningSession) -> None:
    planner, meshes, modes = gpt2._planner, gpt2._meshes(None, "ilp"), modes_of(gpt2._analysis, None)

    def known(memory_bytes: int, *, has_pipelines: bool = False) -> Any:
        constraints = SearchConstraints(memory_bytes=memory_bytes, restrict=lambda mesh: None)
        return find_infeasible(planner, meshes, gpt2._counts, modes, constraints, has_pipelines=has_pipelines)

    static_bytes = planner.least_static_bytes(planner.run_of(meshes[0], 1, "none"))
    assert known(int(static_bytes) - 1).bound_bytes == static_bytes
    assert known(int(static_bytes) - 1, has_pipelines=True).bound_bytes == static_bytes
    least_bytes = gpt2.least_memory_bytes()
    assert least_bytes is not None
    assert known(int(least_bytes * 0.9)).bound_bytes > least_bytes * 0.9
    assert known(least_bytes) is None
    assert known(int(least_bytes * 0.9), has_pipelines=True) is None


@pytest.mark.parametrize(
    ("options", "given", "absent"),
    [
        ({"ac": "full", "micro_batches": 8}, [], ["--ac", "--micro-batches"]),
        ({"ac": "none", "micro_batches": 2}, ["--ac full", "--micro-batches"], []),
        ({}, [], ["--ac", "--micro-batches"]),  # the search has tried them all
    ],
)
def test_advice_never_repeats_what_the_job_has(options: dict[str, Any], given: list[str], absent: list[str]) -> None:
    error = refusal_of(session_of("gpt2", mesh=None, memory_gb=TINY_GB, **options), mesh="dp=4")
    assert "Offloading to host memory is not planned here." in error.what_to_do
    for words in given:
        assert words in error.what_to_do
    for words in absent:
        assert words not in error.what_to_do


def test_a_cap_just_below_the_least_found_is_refused_without_the_search(
    gpt2: PlanningSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner, modes, meshes = gpt2._planner, modes_of(gpt2._analysis, None), gpt2._meshes(None, "ilp")
    least = LeastMemorySearch(planner, lambda mesh: None).run(all_runs(planner, meshes, gpt2._counts, modes)).least
    assert least is not None
    cap = int(0.985 * least.nbytes)

    def bounded(share: float) -> LeastMemoryResult:
        return LeastMemoryResult(least=least, bound_bytes=share * least.nbytes)

    def known(share: float, seconds: float = 0.0) -> LeastMemoryResult | None:
        monkeypatch.setattr(infeasibility, "_CHECK_S", seconds)
        monkeypatch.setattr(LeastMemorySearch, "run", lambda *args, **options: bounded(share))
        constraints = SearchConstraints(memory_bytes=cap, restrict=lambda mesh: None)
        return find_infeasible(planner, meshes, gpt2._counts, modes, constraints, has_pipelines=False)

    assert known(0.5) is None
    assert known(0.98, seconds=60.0) is None  # the search ended before its time
    assert known(0.98) == bounded(0.98)
    error = refusal_of(gpt2, memory_bytes=cap)
    assert error.bound_bytes == int(0.98 * least.nbytes)
    assert error.least_bytes == math.ceil(least.nbytes)
    assert "No plan was found that fits" in str(error)
