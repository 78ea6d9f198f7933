"""The search over meshes: the memory cap binds, an infeasible job gets a report of what would fit, bounds hold."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support import families
from torch.distributed.tensor import Replicate

from planner.build import build_plan
from planner.errors import InfeasibleError, MeshError
from planner.graph.trace_module import divisor_chains, micro_batch_counts
from planner.plan.sharding_plan import ShardingPlan
from planner.search.mesh_space import meshes_of
from planner.session import MeshSpec, PlanningSession

GAP = 1e-3


def plan_with(inputs: dict[str, Any], module: Any, memory_gb: float | None, **options: Any) -> ShardingPlan:
    return build_plan(
        module,
        cluster="4xtoy",
        example_inputs=inputs,
        dtype="fp32",
        memory_gb=memory_gb,
        **({"mesh": "dp=2,tp=2", "micro_batches": 1, "tolerance": 0.0} | options),
    )


def peak(plan: ShardingPlan) -> int:
    assert plan.estimate is not None
    return plan.estimate.peak_memory_bytes


def step_time_s(plan: ShardingPlan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_time_s


def stored_whole(plan: ShardingPlan) -> int:
    """Return how many parameters every device keeps whole."""
    return sum(all(p == Replicate() for p in layout) for layout in plan.plan.values() if not isinstance(layout, str))


def parameter_bytes(plan: ShardingPlan) -> int:
    assert plan.estimate is not None
    return plan.estimate.memory["parameters"]


@pytest.mark.parametrize("planner", ["ilp", "tensor-parallel"])
def test_the_cap_binds_until_nothing_fits(planner: str) -> None:
    module, inputs = families.make("mlp", 8)
    options = {"planner": planner, "tp_plan": {"fc1": "colwise", "fc2": "rowwise"}}
    free = plan_with(inputs, module, None, **options)
    plans, cap = [free], peak(free)
    while True:
        try:
            plan = plan_with(inputs, module, (cap - 1) / 1e9, **options)
        except InfeasibleError as error:
            report = error
            break
        assert peak(plan) <= cap - 1
        plans.append(plan)
        cap = min(peak(plan), round(cap * 0.97))
    times = [step_time_s(plan) for plan in plans]
    assert all(later >= earlier * (1 - GAP) for earlier, later in itertools.pairwise(times)), times
    assert report.budget_bytes == cap - 1
    assert report.least_bytes is not None
    assert report.least_bytes > report.budget_bytes
    assert str(report.least_bytes) in str(report)
    assert report.largest_tensors
    least = plan_with(inputs, module, report.least_bytes / 1e9, **options)
    assert peak(least) <= report.least_bytes
    with pytest.raises(InfeasibleError):
        plan_with(inputs, module, report.least_bytes * 0.989 / 1e9, **options)  # at most 1 % could be spared


def test_from_replicated_to_sharded_as_memory_falls() -> None:
    """On links too slow to be worth using, parameters stay whole until memory forbids it."""
    module, inputs = families.make("mlp", 8)
    slow = {
        "devices_per_node": 4,
        "device": "toy",
        "intra_node": {"bandwidth_bytes_per_s": 1e7, "latency_s": 1e-3, "source": "a fiction"},
    }

    def at(memory_gb: float | None) -> ShardingPlan:
        return build_plan(
            module, cluster=slow, example_inputs=inputs, mesh="dp=4", memory_gb=memory_gb, micro_batches=1, dtype="fp32"
        )

    free = at(None)
    assert stored_whole(free) == len(free.plan)
    some, most = at(peak(free) * 0.9 / 1e9), at(peak(free) * 0.5 / 1e9)
    assert stored_whole(free) > stored_whole(some)
    assert parameter_bytes(free) > parameter_bytes(some) > parameter_bytes(most)
    assert step_time_s(free) < step_time_s(some) < step_time_s(most)


def test_more_micro_batches_or_checkpointing_when_activations_do_not_fit() -> None:
    module, inputs = families.make("gpt2", 8)
    options = {"micro_batches": None, "mesh": "dp=4"}
    free = plan_with(inputs, module, None, ac="none", **options)
    tight = plan_with(inputs, module, peak(free) * 0.6 / 1e9, ac="none", **options)
    assert tight.micro_batches > free.micro_batches
    assert step_time_s(tight) >= step_time_s(free)
    chosen = plan_with(inputs, module, peak(free) * 0.6 / 1e9, ac=None, **options)
    assert step_time_s(chosen) <= step_time_s(tight) * (1 + GAP)


def test_automatic_meshes_are_no_slower_than_any_given_one() -> None:
    module, inputs = families.make("mlp", 8)
    session = PlanningSession(module, cluster="4xtoy", example_inputs=inputs, dtype="fp32", micro_batches=1)
    best = session.plan()
    for mesh in ("dp=4", "dp=2,tp=2"):
        assert step_time_s(best) <= step_time_s(session.plan(mesh=mesh)) * (1 + GAP)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (7, [(1,), (7,)]),
        (8, [(1, 2, 4, 8)]),
        (12, [(1, 2, 4), (3, 6, 12)]),
        (96, [(1, 2, 4, 8, 16, 32), (3, 6, 12, 24, 48, 96)]),
    ],
)
def test_a_batch_is_cut_into_powers_of_two_or_into_pieces_of_such(batch: int, found: list[tuple[int, ...]]) -> None:
    counts = micro_batch_counts(batch)
    assert counts == sorted(count for row in found for count in row)
    assert divisor_chains(counts) == found


def test_a_device_may_have_one_sample_of_three_times_as_many() -> None:
    module, inputs = families.make("gpt2", 12)
    least = {}
    for count in (1, 3):
        options: dict[str, Any] = {"micro_batches": count, "ac": "none", "dtype": "fp32"}
        session = PlanningSession(module, cluster="4xtoy", example_inputs=inputs, **options)
        least[count] = session.least_memory_bytes(mesh="dp=4")
    assert least[3] is not None
    assert least[1] is not None
    assert least[3] < least[1]
    found = plan_with(inputs, module, (least[3] + least[1]) / 2e9, micro_batches=None, mesh="dp=4", ac="none")
    assert found.micro_batches == 3


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "share"), [(8, 0.45), (8, 0.6), (8, 1.0), (12, 0.6)])
def test_the_search_finds_what_solving_every_run_finds(batch: int, share: float) -> None:
    """Meshes, numbers of micro-batches and checkpointing, with a cap that binds: bounds leave out no better run."""
    module, inputs = families.make("llama", batch)
    free = plan_with(inputs, module, None, mesh="dp=4", ac="none")
    session = PlanningSession(
        module, cluster="4xtoy", example_inputs=inputs, dtype="fp32", memory_gb=peak(free) * share / 1e9
    )
    planner = session._planner
    runs = [
        planner.run_of(mesh, count, ac)
        for mesh in meshes_of(session.cluster)
        for count in micro_batch_counts(batch)
        for ac in ("none", "selective", "full")
    ]
    solved = (planner.solve(run, None, memory_bytes=planner.memory_bytes) for run in runs)
    candidates = [candidate for candidate in solved if candidate is not None]
    least_s = min(candidate.estimate.step_time_s for candidate in candidates)
    assert len(candidates) < len(runs) or share == 1.0, "the cap rules out no run: the test shows less than it should"
    assert step_time_s(session.plan()) <= least_s * (1 + 2 * GAP)


def test_a_mesh_that_is_not_the_cluster_is_refused() -> None:
    module, inputs = families.make("mlp", 8)
    with pytest.raises(MeshError, match="8 devices"):
        build_plan(module, cluster="4xtoy", example_inputs=inputs, mesh=MeshSpec.parse("dp=2,tp=4"))
