"""Plans of models with experts run the collectives of their estimates, as in ``test_fidelity``."""

from __future__ import annotations

import functools

import pytest
from support.families import make

from executor.verify import verify
from planner import PlanningSession

BATCH = 8
MESHES = ("dp=2,tp=2", "dp=1,tp=4")
SLOW = pytest.mark.slow


@functools.lru_cache(maxsize=1)
def session(family: str) -> PlanningSession:
    module, inputs = make(family, BATCH)
    return PlanningSession(module, cluster="1x4xtoy", example_inputs=inputs, dtype="fp32", micro_batches=1, ac="none")


def check(family: str, session: PlanningSession, planner: str, mesh: str) -> set[str]:
    """Check that a plan runs as planned, and return the kinds of its collectives."""
    module, inputs = make(family, BATCH)
    report = verify(module, session.plan(planner=planner, mesh=mesh), inputs)
    assert report.expected
    assert report.equal, (planner, report.differences)
    return {row.kind for row in report.expected}


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("mixtral", "dp=2,tp=2"),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [
                ("mixtral", "dp=1,tp=4"),
                ("deepseek", "dp=2,tp=2"),
                ("deepseek", "dp=1,tp=4"),
            ]
        ),
    ],
)
def test_plans_of_the_planners_run_as_planned(family: str, mesh: str) -> None:
    for planner in ("ilp", "data-parallel", "fully-sharded", "tensor-parallel"):
        check(family, session(family), planner, mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("family", "seeds"),
    [
        pytest.param("mixtral", range(3), id="mixtral-3"),
        pytest.param("mixtral", range(3, 12), id="mixtral-9", marks=SLOW),
        pytest.param("deepseek", range(10), id="deepseek-10", marks=SLOW),
    ],
)
def test_random_plans_run_as_planned(family: str, mesh: str, seeds: range) -> None:
    kinds = [check(family, session(family), f"random:{seed}", mesh) for seed in seeds]
    assert set.union(*kinds) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


@pytest.mark.parametrize("used", ["S(0)", "SS(1,2)"])
def test_sharded_experts_run_as_planned(used: str) -> None:
    module, inputs = make("mixtral", BATCH)
    pins = (f"model.layers.*.mlp.experts.gate_up_proj:used={used}@tp",)
    pinned = PlanningSession(
        module, cluster="1x4xtoy", example_inputs=inputs, dtype="fp32", micro_batches=1, ac="none", pins=pins
    )
    for mesh in MESHES:
        check("mixtral", pinned, "ilp", mesh)
    check("mixtral", pinned, "random:0", MESHES[0])


@pytest.mark.slow
@pytest.mark.parametrize("ac", ["full", "selective"])
def test_checkpointed_plans_in_bf16_with_micro_batches_run_as_planned(ac: str) -> None:
    module, inputs = make("mixtral", 2 * BATCH)
    two = PlanningSession(module, cluster="1x4xtoy", example_inputs=inputs, dtype="bf16", micro_batches=2, ac=ac)
    for planner in ("ilp", "fully-sharded", "random:1", "random:2"):
        check("mixtral", two, planner, "dp=2,tp=2")
