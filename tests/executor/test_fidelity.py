"""What is planned is what runs: for every family, mesh and planner, the collectives counted equal those of the plan.

Plans of all planners and twenty random ones, on fake processes; DTensor's implicit collectives are counted too.
"""

from __future__ import annotations

import functools
import itertools

import pytest
from support.families import FAMILIES, make

from executor.verify import VerifyReport, verify
from planner import PlanningSession
from planner.errors import BaselineError
from planner.plan.sharding_plan import ShardingPlan

MESHES = ("dp=2,tp=2", "dp=1,tp=4")
SEEDS = [pytest.param(range(4), id="4-random"), pytest.param(range(4, 20), id="16-random", marks=pytest.mark.slow)]
"""Twenty random plans for each family and mesh; four of them in every run of the tests."""
BATCH = 8


@functools.lru_cache(maxsize=1)
def session(family: str) -> PlanningSession:
    """The family's session; random plans and baselines share one trace and one table of strategies."""
    module, inputs = make(family, BATCH)
    return PlanningSession(module, cluster="1x4xtoy", example_inputs=inputs, dtype="fp32", micro_batches=1, ac="none")


def check(family: str, plan: ShardingPlan, micro_batch: int = BATCH) -> VerifyReport:
    module, inputs = make(family, micro_batch)
    report = verify(module, plan, inputs)
    assert report.observed or plan.mesh.size == 1
    assert report.equal, report.differences
    return report


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_plans_of_the_planners_run_as_planned(family: str, mesh: str) -> None:
    report = check(family, session(family).plan(mesh=mesh))
    # A plan without any collective would prove nothing.
    assert report.expected
    for planner in ("data-parallel", "fully-sharded"):
        check(family, session(family).plan(planner=planner, mesh=mesh))
    if family == "llama":
        check(family, session(family).plan(planner="tensor-parallel", mesh=mesh))
    else:
        with pytest.raises(BaselineError, match="no tensor-parallel plan"):
            session(family).plan(planner="tensor-parallel", mesh=mesh)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_plans_run_as_planned(family: str, mesh: str, seeds: range) -> None:
    kinds: set[str] = set()
    for seed in seeds:
        report = check(family, session(family).plan(planner=f"random:{seed}", mesh=mesh))
        kinds.update(row.kind for row in report.expected)
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


@pytest.mark.parametrize("planner", ["fully-sharded", "random:0", "random:1"])
def test_plans_on_three_axes_run_as_planned(planner: str) -> None:
    module, inputs = make("mlp", 2 * BATCH)
    session = PlanningSession(module, cluster="8xtoy", example_inputs=inputs, dtype="fp32", micro_batches=1, ac="none")
    report = verify(module, session.plan(planner=planner, mesh="dp=2,fsdp=2,tp=2"), inputs)
    assert report.expected
    assert report.equal, report.differences


WAITING = {"nodes": 1, "devices_per_node": 4, "device": {"name": "toy", "overlaps": False}}
"""Devices that wait for every collective, so that gathering once in place of twice pays."""


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("family", "ac"), [("llama", "full"), ("gpt2", "none")])
def test_gathers_are_kept_where_links_are_slow_and_there_is_memory(family: str, ac: str, micro_batches: int) -> None:
    module, inputs = make(family, 2 * BATCH)
    options = {"dtype": "fp32", "micro_batches": micro_batches, "ac": ac}
    session = PlanningSession(module, cluster=WAITING, example_inputs=inputs, **options)
    plan = session.plan(planner="fully-sharded", mesh="dp=4")
    # From forward to backward, or, where that is not all of a step, for the step.
    kept, others = plan.keep_gathered, plan.keep_gathered_for_step
    if micro_batches > 1:
        kept, others = others, kept
    assert kept == tuple(plan.fully_shard) != ()
    assert not others
    check(family, plan)


def test_a_cap_on_memory_has_gathered_parameters_dropped() -> None:
    plans = []
    module, inputs = make("llama", BATCH)
    for share in (None, 0.85):
        memory = {} if share is None else {"memory_gb": share * plans[0].estimate.peak_memory_bytes / 1e9}
        options = {"dtype": "fp32", "micro_batches": 1, "ac": "none", **memory}
        session = PlanningSession(module, cluster=WAITING, example_inputs=inputs, **options)
        plans.append(session.plan(planner="fully-sharded", mesh="dp=4"))
        check("llama", plans[-1])
    kept, dropped = plans
    assert kept.keep_gathered
    assert dropped.fully_shard == kept.fully_shard
    assert not dropped.keep_gathered
    assert dropped.estimate.peak_memory_bytes < kept.estimate.peak_memory_bytes
    assert dropped.estimate.step_time_s > kept.estimate.step_time_s


@pytest.mark.parametrize(
    ("family", "ac"),
    [
        *itertools.product(["llama", "t5"], ["full", "selective"]),
        ("llama", "full:1"),
        pytest.param("t5", "full:1", marks=pytest.mark.slow),
    ],
)
def test_checkpointed_plans_in_bf16_with_micro_batches_run_as_planned(family: str, ac: str) -> None:
    module, inputs = make(family, 2 * BATCH)
    session = PlanningSession(module, cluster="1x4xtoy", example_inputs=inputs, dtype="bf16", micro_batches=2, ac=ac)
    planners = ("ilp", "fully-sharded", "random:1", "random:2")
    reports = {planner: check(family, session.plan(planner=planner, mesh="dp=2,tp=2")) for planner in planners}
    # The others gather over both axes ahead of their blocks, which then repeat no communication.
    for planner in planners[2:]:
        assert any(row.phase == "recompute" for row in reports[planner].expected), planner
