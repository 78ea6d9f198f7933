"""What else could be had: each plan beside the best is the best of its own kind, and what is said of a mesh holds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from support import families

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.build import build_plan
from planner.errors import InfeasibleError, JobError, SolverError
from planner.plan.estimate import MeshReport
from planner.plan.sharding_plan import ShardingPlan
from planner.search.mesh_space import mesh_of_shape
from planner.session import PlanningSession
from planner.tradeoffs import alternatives, best_size, pareto_front, part_of, parts_of, peak_bytes, step_time_s, sweep

JOB: dict[str, Any] = {"cluster": "1x4xtoy", "dtype": "fp32", "ac": "none", "tolerance": 0.0}
FAMILIES = ("mlp", pytest.param("gpt2", marks=pytest.mark.slow))
MESHES = ("dp=4", "dp=2,tp=2")
GAPS = 1 + 3e-3
"""Two plans are each within the gap of 0.1 % of the best, and priced a little more exactly than they are solved."""


@functools.cache
def session(family: str, batch: int = 8) -> PlanningSession:
    module, inputs = families.make(family, batch)
    return PlanningSession(module, example_inputs=inputs, **JOB)


def reports(plan: ShardingPlan) -> dict[str, MeshReport]:
    """Return mesh, in the search's names -> its outcome; the plan's own mesh is named by role."""
    assert plan.solver is not None
    return {searched(MeshSpec.parse(report.mesh)): report for report in plan.solver.meshes}


def searched(mesh: MeshSpec) -> str:
    """Return ``mesh`` in the search's names, as text."""
    return str(mesh_of_shape(mesh.shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_alternatives_are_the_best_of_the_other_meshes(family: str) -> None:
    planned = session(family)
    best = planned.plan()
    (second,) = alternatives(planned, best, 5)
    alone = {mesh: planned.plan_if_any(mesh=mesh, keep_names=False) for mesh in MESHES}
    assert {searched(best.mesh), searched(second.mesh)} == set(MESHES)
    assert second == without_timings(alone[searched(second.mesh)], second)
    assert step_time_s(best) <= step_time_s(second) * GAPS


def without_timings(plan: ShardingPlan | None, other: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` with what differs each time, the seconds that it took, as ``other`` has them."""
    assert plan is not None
    assert plan.solver is not None
    assert other.solver is not None
    solver = dataclasses.replace(plan.solver, time_s=other.solver.time_s)
    return dataclasses.replace(plan, timings=other.timings, solver=solver)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [1.0, 0.75, 0.5])
def test_what_is_said_of_a_mesh_holds(family: str, share: float) -> None:
    planned = session(family)
    memory_bytes = int(peak_bytes(planned.plan()) * share)
    best = planned.plan_if_any(memory_bytes=memory_bytes)
    if best is None:
        assert all(planned.plan_if_any(mesh=mesh, memory_bytes=memory_bytes) is None for mesh in MESHES)
        return
    found = reports(best)
    assert list(found) == list(MESHES)
    assert found[searched(best.mesh)].outcome == "chosen"
    for mesh, report in found.items():
        alone = planned.plan_if_any(mesh=mesh, memory_bytes=memory_bytes)
        assert (alone is None) <= (report.outcome in ("does-not-fit", "slower"))
        if report.outcome == "does-not-fit":
            assert alone is None
            assert report.at_least_s is None
        elif alone is not None:
            assert report.at_least_s is not None
            assert report.at_least_s <= step_time_s(alone)
            assert step_time_s(best) <= step_time_s(alone) * GAPS
        if report.step_time_s is not None and alone is not None:
            assert step_time_s(alone) <= report.step_time_s * GAPS


def test_a_mesh_that_does_not_fit() -> None:
    """The meshes need different memory at least; between the two only one of them is left."""
    module, inputs = families.make("mlp", 2)
    planned = PlanningSession(module, example_inputs=inputs, micro_batches=1, **JOB)
    each = {mesh: least_bytes(planned, mesh) for mesh in MESHES}
    smaller, larger = sorted(each, key=lambda mesh: each[mesh])
    assert each[smaller] < each[larger]
    plan = planned.plan(memory_bytes=(each[smaller] + each[larger]) // 2)
    assert searched(plan.mesh) == smaller
    report = reports(plan)[larger]
    assert report.outcome in ("does-not-fit", "slower")
    assert (report.at_least_s is None) == (report.outcome == "does-not-fit")
    assert report.step_time_s is None


def test_does_not_fit_is_said_of_what_does_not() -> None:
    """Choices that are left out because they are slow may fit; 40 caps between the least and what is free."""
    planned = session("mlp")
    most, least = peak_bytes(planned.plan()), min(least_bytes(planned, mesh) for mesh in MESHES)
    for step in range(40):
        memory_bytes = least + (most - least) * step // 40
        best = planned.plan_if_any(memory_bytes=memory_bytes)
        for mesh, report in ({} if best is None else reports(best)).items():
            if report.outcome in ("does-not-fit", "no-layout"):
                assert planned.plan_if_any(mesh=mesh, memory_bytes=memory_bytes) is None


def least_bytes(planned: PlanningSession, mesh: str) -> int:
    with pytest.raises(InfeasibleError) as caught:
        planned.plan(mesh=mesh, memory_bytes=1000)
    assert caught.value.least_bytes is not None
    return caught.value.least_bytes


def test_one_mesh_alone_is_not_reported() -> None:
    planned = session("mlp")
    plan = planned.plan(planner="ilp", mesh="dp=4")
    assert reports(plan) == {}, "there was nothing to choose from"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_front_is_one_and_ends_at_the_least_memory(family: str) -> None:
    planned = session(family)
    front = pareto_front(planned, share=0.7)
    assert len(front) >= 2
    times, sizes_ = [step_time_s(plan) for plan in front], [peak_bytes(plan) for plan in front]
    assert times == sorted(set(times))
    assert sizes_ == sorted(set(sizes_), reverse=True)
    assert times[0] <= step_time_s(planned.plan()) * GAPS
    for plan in front:
        best = planned.plan(memory_bytes=peak_bytes(plan))
        assert step_time_s(plan) <= step_time_s(best) * GAPS
    with pytest.raises(InfeasibleError) as caught:
        planned.plan(memory_bytes=sizes_[-1] - 1)
    error = caught.value
    assert error.least_bytes is not None
    assert (error.bound_bytes or 0.99 * error.least_bytes) <= sizes_[-1] <= error.least_bytes


@pytest.mark.parametrize("share", [0.0, 1.0, -2.0])
def test_a_share_is_a_part(share: float) -> None:
    with pytest.raises(JobError, match="part of 1"):
        pareto_front(session("mlp"), share=share)


def test_sizes_are_what_each_cluster_gives() -> None:
    module, inputs = families.make("mlp", 8)
    options = {"dtype": "fp32", "ac": "none"}
    whole = build_plan(module, example_inputs=inputs, cluster="1x1xtoy", **options)
    options["memory_gb"] = peak_bytes(whole) * 0.9 / 1e9
    found = sweep(module, example_inputs=inputs, cluster="2x2xtoy", **options)
    assert [size.cluster.name for size in found] == ["1x1xtoy", "1x2xtoy", "2x2xtoy"]
    assert found[0].plan is None
    for size in found[1:]:
        assert size.plan is not None
        alone = build_plan(module, example_inputs=inputs, cluster=size.cluster, **options)
        alone = dataclasses.replace(alone, verification=None)  # a sweep does not run its plans
        assert without_timings(alone, size.plan) == size.plan
    small, large = found[1], found[2]
    assert small.plan is not None
    assert large.plan is not None
    assert step_time_s(large.plan) < step_time_s(small.plan)
    assert best_size(found, "step-time") is large
    assert best_size(found, "fewest-devices") is small
    assert best_size(found, "fewest-devices", within_s=step_time_s(large.plan)) is large
    assert best_size(found, "cost") is min((small, large), key=lambda size: size.device_s)
    assert best_size(found, "cost", within_s=step_time_s(large.plan) / 2) is None


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("1x1xtoy", ["1x1"]),
        ("3x6xh100-sxm-80gb", ["1x1", "1x2", "1x4", "1x6", "2x6", "3x6"]),
        ("8x8xh100-sxm-80gb", ["1x1", "1x2", "1x4", "1x8", "2x8", "4x8", "8x8"]),
    ],
)
def test_parts_of_a_cluster(cluster: str, expected: list[str]) -> None:
    parts = parts_of(ClusterSpec.parse(cluster))
    assert [f"{part.nodes}x{part.devices_per_node}" for part in parts] == expected
    assert all(part.cards_per_node <= max(1, part.devices_per_node) for part in parts)


def test_enough_devices_are_enough() -> None:
    """The cluster that a refusal names holds the job; half of it was not seen to."""
    module, inputs = families.make("mlp", 16)
    free = build_plan(module, example_inputs=inputs, cluster="1x2xtoy", dtype="fp32")
    memory_gb = least_of(module, inputs, "4x2xtoy") * 1.001 / 1e9
    assert memory_gb * 1e9 < peak_bytes(free)
    with pytest.raises(InfeasibleError, match="a cluster of") as caught:
        build_plan(module, example_inputs=inputs, cluster="1x2xtoy", dtype="fp32", memory_gb=memory_gb)
    enough = caught.value.enough
    assert enough in ("2x2xtoy", "4x2xtoy")
    plan = build_plan(module, example_inputs=inputs, cluster=enough, dtype="fp32", memory_gb=memory_gb)
    assert peak_bytes(plan) <= memory_gb * 1e9


def least_of(module: Any, inputs: dict[str, Any], cluster: str) -> int:
    with pytest.raises(InfeasibleError) as caught:
        build_plan(module, example_inputs=inputs, cluster=cluster, dtype="fp32", memory_gb=1e-6)
    assert caught.value.least_bytes is not None
    return caught.value.least_bytes


def test_enough_devices_are_enough_for_the_planner_that_is_refused() -> None:
    """Fully sharded needs a batch that all devices divide: of four samples there are no eight parts."""
    module, inputs = families.make("mlp", 4)
    options: dict[str, Any] = {"example_inputs": inputs, "dtype": "fp32", "planner": "fully-sharded"}
    for batch_holds, cluster in ((False, "1x4xtoy"), (True, "1x2xtoy")):
        with pytest.raises(InfeasibleError) as caught:
            build_plan(module, cluster=cluster, memory_gb=1e-6, **options)
        least = caught.value.least_bytes
        assert least is not None
        with pytest.raises(InfeasibleError) as caught:
            build_plan(module, cluster=cluster, memory_gb=least * 0.8 / 1e9, **options)
        if not batch_holds:
            assert caught.value.enough is None
        elif caught.value.enough is not None:
            plan = build_plan(module, cluster=caught.value.enough, memory_gb=least * 0.8 / 1e9, **options)
            assert peak_bytes(plan) <= least * 0.8


def test_parts_take_the_sweeps_that_they_can_have() -> None:
    sweep = {"kind": "all_reduce", "nodes": 1, "nbytes": [1e3, 1e6], "times_s": [1e-5, 1e-3]}
    sweeps = [{**sweep, "ranks_per_node": ranks} for ranks in (2, 4)]
    cluster = ClusterSpec.from_dict({"nodes": 2, "devices_per_node": 4, "device": "toy", "sweeps": sweeps})
    parts = parts_of(cluster)
    assert [len(part.sweeps) for part in parts] == [0, 1, 2, 2]
    assert all(ClusterSpec.from_dict(part.to_dict()) == part for part in parts)


def test_what_was_found_in_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = session("mlp")
    best = planned.plan()

    def out_of_time(*_: Any, **__: Any) -> None:
        raise SolverError("time was up before any plan was found.")

    monkeypatch.setattr(PlanningSession, "plan_if_any", out_of_time)
    assert alternatives(planned, best, 3) == ()
    monkeypatch.setattr(PlanningSession, "plan", lambda *_, **__: best)
    assert pareto_front(planned) == [best]
    module, inputs = families.make("mlp", 8)
    (one, two) = sweep(module, example_inputs=inputs, cluster="1x2xtoy", dtype="fp32", ac="none")
    assert (one.plan, one.in_time, two.in_time) == (None, False, False)
    assert best_size([one, two], "cost") is None


@pytest.mark.parametrize(
    ("cluster", "count", "part"),
    [("1x8xtoy", 3, "1x3xtoy"), ("2x8xtoy", 12, "2x6xtoy"), ("4x8xtoy", 24, "3x8xtoy"), ("2x8xtoy", 16, "2x8xtoy")],
)
def test_a_number_of_devices_fills_as_few_nodes_evenly(cluster: str, count: int, part: str) -> None:
    assert part_of(ClusterSpec.parse(cluster), count).name == part


@pytest.mark.parametrize(("count", "advice"), [(17, "from 1 to 16"), (9, "such as 8"), (0, "from 1 to 16")])
def test_a_number_of_devices_that_the_cluster_does_not_have_is_refused(count: int, advice: str) -> None:
    with pytest.raises(JobError, match=advice):
        part_of(ClusterSpec.parse("2x8xtoy"), count)
