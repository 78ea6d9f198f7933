"""Plans run the collectives of their estimates: every family, mesh and planner, and random plans, on fake processes.

DTensor's implicit collectives are counted too.
"""

from __future__ import annotations

import functools

import pytest
from support.families import FAMILIES, make

from executor.verify import VerifyReport, verify
from planner import PlanningSession
from planner.errors import BaselineError
from planner.plan.sharding_plan import ShardingPlan

MESHES = ("dp=2,tp=2", "dp=1,tp=4")
SEEDS = [pytest.param(range(4), id="4-random"), pytest.param(range(4, 20), id="16-random", marks=pytest.mark.slow)]
"""Seeds of twenty random plans for each family and mesh; four of them run in the fast suite."""
BATCH = 8


@functools.lru_cache(maxsize=1)
def session(family: str) -> PlanningSession:
    """Return the session of a family; its plans share one trace and one table of strategies."""
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


@pytest.mark.parametrize("planner", ["ilp", "random:0"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_plans_with_one_sample_on_a_rank_run_as_planned(family: str, planner: str) -> None:
    """DTensor treats a shard of length 1 differently: what it does with several samples on a rank proves nothing."""
    module, inputs = make(family, 2)
    job = {"dtype": "fp32", "micro_batches": 1, "ac": "none"}
    session = PlanningSession(module, cluster="1x8xtoy", example_inputs=inputs, **job)
    check(family, session.plan(planner=planner, mesh="dp=2,tp=4"), 2)


WAITING = {"nodes": 1, "devices_per_node": 4, "device": {"name": "toy", "overlaps": False}}
"""A cluster whose devices wait for every collective, so that one all-gather instead of two pays."""


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("family", "ac"), [("llama", "full"), ("gpt2", "none")])
def test_parameters_stay_gathered_where_links_are_slow(family: str, ac: str, micro_batches: int) -> None:
    module, inputs = make(family, 2 * BATCH)
    options = {"dtype": "fp32", "micro_batches": micro_batches, "ac": ac}
    session = PlanningSession(module, cluster=WAITING, example_inputs=inputs, **options)
    plan = session.plan(planner="fully-sharded", mesh="dp=4")
    # From forward to backward; with several micro-batches, for the step.
    gathered, other = plan.keep_gathered, plan.keep_gathered_for_step
    if micro_batches > 1:
        gathered, other = other, gathered
    assert gathered == tuple(plan.fully_shard) != ()
    assert not other
    check(family, plan)


def test_a_memory_cap_makes_parameters_reshard_after_the_forward() -> None:
    plans = []
    module, inputs = make("llama", BATCH)
    for share in (None, 0.85):
        memory = {} if share is None else {"memory_gb": share * plans[0].estimate.peak_memory_bytes / 1e9}
        options = {"dtype": "fp32", "micro_batches": 1, "ac": "none", **memory}
        session = PlanningSession(module, cluster=WAITING, example_inputs=inputs, **options)
        plans.append(session.plan(planner="fully-sharded", mesh="dp=4"))
        check("llama", plans[-1])
    gathered, resharded = plans
    assert gathered.keep_gathered
    assert resharded.fully_shard == gathered.fully_shard
    assert not resharded.keep_gathered
    assert resharded.estimate.peak_memory_bytes < gathered.estimate.peak_memory_bytes
    assert resharded.estimate.step_time_s > gathered.estimate.step_time_s


@pytest.mark.parametrize(
    ("family", "ac"),
    [
        ("llama", "full"),
        ("llama", "selective"),
        ("llama", "full:1,selective"),
        pytest.param("t5", "full", marks=pytest.mark.slow),
        pytest.param("t5", "selective", marks=pytest.mark.slow),
        pytest.param("llama", "full:1", marks=pytest.mark.slow),
        pytest.param("t5", "full:1", marks=pytest.mark.slow),
    ],
)
def test_checkpointed_plans_in_bf16_with_micro_batches_run_as_planned(family: str, ac: str) -> None:
    module, inputs = make(family, 2 * BATCH)
    session = PlanningSession(module, cluster="1x4xtoy", example_inputs=inputs, dtype="bf16", micro_batches=2, ac=ac)
    planners = ("ilp", "fully-sharded", "random:1", "random:2")
    reports = {planner: check(family, session.plan(planner=planner, mesh="dp=2,tp=2")) for planner in planners}
    # The other planners gather over both axes before the blocks, so recomputation repeats no collective.
    for planner in planners[2:]:
        assert any(row.phase == "recompute" for row in reports[planner].expected), planner
