"""What is planned is what runs: for every family, mesh and planner, the collectives counted equal those of the plan.

Plans of all planners and twenty random ones, on fake processes; DTensor's implicit collectives are counted too.
"""

from __future__ import annotations

import functools
import itertools

import pytest
from families import FAMILIES, make

from executor.verify import VerifyReport, verify
from planner import PlanningSession
from planner.errors import BaselineError
from planner.plan import ShardingPlan

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
    for planner in ("ilp", "fully-sharded", "random:1", "random:2"):
        report = check(family, session.plan(planner=planner, mesh="dp=2,tp=2"))
        assert any(row.phase == "recompute" for row in report.expected)
