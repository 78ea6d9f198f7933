"""Baselines as people launch them: their meshes and layouts, never faster than the optimum, and the plan chosen."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from support import families
from torch.distributed.tensor import Replicate, Shard

from cost_model import ClusterSpec
from planner.build import build_plan
from planner.errors import InfeasibleError, MeshError, SolverError
from planner.plan.estimate import BaselinePrice
from planner.plan.sharding_plan import ShardingPlan
from planner.run.baselines import _block_placements
from planner.search.baseline_search import INFERENCE, TRAINING, baseline_space
from planner.session import PlanningSession

R, S0 = Replicate(), Shard(0)
GAP = 1e-3


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@cache
def session_of(family: str, cluster: str, **options: Any) -> PlanningSession:
    module, inputs = families.make(family, 8)
    return PlanningSession(module, cluster=cluster, example_inputs=inputs, dtype="fp32", **options)


@cache
def planned(family: str, cluster: str, tolerance: float | None, **options: Any) -> ShardingPlan:
    return session_of(family, cluster, **options).plan(tolerance=tolerance)


def by_name(prices: tuple[BaselinePrice, ...]) -> dict[str, BaselinePrice]:
    return {price.name: price for price in prices}


def step_time_s(plan: ShardingPlan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_time_s


def meshes(name: str, cluster: str) -> list[str]:
    space = baseline_space(name, ClusterSpec.parse(cluster))
    return [] if space is None else [str(mesh) for mesh, _ in space.meshes]


def test_the_meshes_of_baselines_name_axes_by_what_they_do() -> None:
    assert meshes("ddp", "2x4xtoy") == ["dp=8"]
    assert meshes("fsdp", "2x4xtoy") == ["fsdp=8"]
    assert meshes("hsdp", "2x4xtoy") == ["dp=2,fsdp=4"]
    assert meshes("fsdp-tp", "2x4xtoy") == ["fsdp=4,tp=2", "fsdp=2,tp=4"]
    assert meshes("tp", "2x4xtoy") == ["dp=4,tp=2", "dp=2,tp=4"]
    assert meshes("tp", "1x4xtoy") == ["dp=2,tp=2", "tp=4"]
    assert meshes("fsdp-tp", "1x4xtoy") == ["fsdp=2,tp=2"]
    assert meshes("hsdp", "1x4xtoy") == []
    assert [meshes(name, "1x1xtoy") for name in TRAINING] == [["dp=1"], [], [], []]
    assert meshes("fsdp-tp", "2x3xtoy") == []


@pytest.mark.parametrize(
    ("family", "cluster"),
    [("mlp", "1x4xtoy"), ("mlp", "2x4xtoy"), ("llama", "2x2xtoy"), slow("gpt2", "1x2xtoy"), slow("t5", "1x4xtoy")],
)
def test_no_baseline_is_faster_than_the_optimum(family: str, cluster: str) -> None:
    plan = planned(family, cluster, 0.0)
    assert plan.solver is not None
    assert plan.solver.bound_s is not None
    assert [price.name for price in plan.baselines] == [
        n for n in TRAINING if baseline_space(n, session_cluster(cluster))
    ]
    fitting = [price.step_time_s for price in plan.baselines if price.step_time_s is not None]
    assert len(fitting) >= 2
    for time_s in fitting:
        assert time_s >= plan.solver.bound_s * (1 - 1e-9)
        assert time_s >= step_time_s(plan)


def session_cluster(cluster: str) -> ClusterSpec:
    return ClusterSpec.parse(cluster)


@pytest.mark.parametrize("name", TRAINING)
def test_a_baseline_by_name_is_the_baseline_that_is_priced(name: str) -> None:
    session = session_of("llama", "2x2xtoy")
    price, plan = by_name(session.priced_baselines())[name], session.plan(planner=name)
    assert plan.estimate is not None
    assert price.step_time_s == pytest.approx(step_time_s(plan), rel=GAP)
    assert (price.mesh, price.name) == (str(plan.mesh), plan.solver.name if plan.solver else "")


def test_the_layouts_of_baselines() -> None:
    session = session_of("llama", "2x2xtoy")
    linear = "model.layers.*.mlp.gate_proj.weight"
    ddp, fsdp, hsdp = (session.plan(planner=name) for name in ("ddp", "fsdp", "hsdp"))
    assert set(ddp.plan.values()) == {(R,)}
    assert set(fsdp.plan.values()) == {(S0,)}
    assert fsdp.compute_plan[linear] == (R,)
    assert set(hsdp.plan.values()) == {(R, S0)}
    tensor = session.plan(planner="fsdp-tp")
    assert tensor.mesh.names == ("fsdp", "tp")
    colwise, rowwise = tensor.plan[linear], tensor.plan["model.layers.*.mlp.down_proj.weight"]
    assert not isinstance(colwise, str)
    assert not isinstance(rowwise, str)
    assert colwise[1] == S0
    assert rowwise[1] == Shard(1)
    assert colwise[0].is_shard()
    assert rowwise[0] == S0


def test_a_baseline_that_does_not_fit_has_its_least_memory() -> None:
    prices = by_name(session_of("gpt2", "2x2xtoy").priced_baselines())
    ddp, fsdp = prices["ddp"], prices["fsdp"]
    assert fsdp.peak_memory_bytes is not None
    session = session_of("gpt2", "2x2xtoy")
    with pytest.raises(InfeasibleError) as report:
        session.plan(planner="ddp", memory_bytes=1)
    least_bytes = report.value.least_bytes
    assert least_bytes is not None
    price = by_name(session.priced_baselines(memory_bytes=least_bytes // 2))["ddp"]
    assert ddp.step_time_s is not None
    assert price.step_time_s is None
    assert price.peak_memory_bytes == pytest.approx(least_bytes, rel=0.02)
    assert session.plan(planner="ddp", memory_bytes=int(least_bytes * 1.01)).estimate is not None


def test_a_batch_that_does_not_divide_has_no_such_baseline() -> None:
    module, inputs = families.make("mlp", 2)
    session = PlanningSession(module, cluster="1x4xtoy", example_inputs=inputs, dtype="fp32")
    price = by_name(session.priced_baselines())["fsdp"]
    assert price == BaselinePrice(name="fsdp", mesh="fsdp=4")
    with pytest.raises(MeshError, match="does not divide over 4 devices"):
        session.plan(planner="fsdp")


def test_a_baseline_without_a_mesh_on_the_cluster_is_refused() -> None:
    with pytest.raises(MeshError, match="there is no hsdp on"):
        session_of("mlp", "1x4xtoy").plan(planner="hsdp")


def test_a_large_tolerance_gives_the_simplest_plan_with_its_cost() -> None:
    optimum, simplest = planned("llama", "2x2xtoy", 0.0), planned("llama", "2x2xtoy", 1.0)
    ddp = by_name(simplest.baselines)["ddp"]
    assert ddp.step_time_s is not None
    assert str(simplest.mesh) == ddp.mesh == "dp=4"
    assert step_time_s(simplest) == pytest.approx(ddp.step_time_s)
    report = simplest.solver
    assert report is not None
    assert report.bound_s is not None
    assert report.gap == pytest.approx((step_time_s(simplest) - report.bound_s) / step_time_s(simplest), abs=1e-6)
    if step_time_s(simplest) > step_time_s(optimum) * (1 + 1e-9):
        assert report.fastest_s == pytest.approx(step_time_s(optimum), rel=GAP)
    assert [each.mesh for each in report.meshes if each.outcome == "chosen"] == ["dp=4"]


def test_without_a_tolerance_the_plan_is_that_of_the_search() -> None:
    exact, zero = planned("llama", "2x2xtoy", None), planned("llama", "2x2xtoy", 0.0)
    assert exact.baselines == ()
    assert (zero.plan, zero.compute_plan, zero.input_plan, zero.mesh) == (
        exact.plan, exact.compute_plan, exact.input_plan, exact.mesh,
    )  # fmt: skip
    assert zero.solver is not None
    assert zero.solver.fastest_s is None


def test_on_a_given_mesh_a_baseline_keeps_the_users_names() -> None:
    module, inputs = families.make("llama", 8)
    plan = build_plan(
        module, cluster="1x4xtoy", example_inputs=inputs, dtype="fp32", mesh="x=4", tolerance=1.0
    )  # fmt: skip
    assert str(plan.mesh) == "x=4"
    assert set(plan.plan.values()) == {(R,)}
    assert plan.estimate is not None
    assert {row.axis for row in plan.estimate.collectives} == {"x"}
    two = build_plan(module, cluster="1x4xtoy", example_inputs=inputs, dtype="fp32", mesh="dp=2,tp=2", tolerance=1.0)
    assert two.mesh.shape == (2, 2)
    assert len(two.baselines) == 3


def test_pins_are_kept() -> None:
    module, inputs = families.make("llama", 8)
    pinned = build_plan(
        module, cluster="1x4xtoy", example_inputs=inputs, dtype="fp32", mesh="dp=4", tolerance=1.0,
        pins=("lm_head.weight=S(1)@dp",),
    )  # fmt: skip
    assert pinned.plan["lm_head.weight"] == (Shard(1),)
    assert pinned.baselines


def test_the_baselines_of_inference_are_replicas_and_tensor_parallelism() -> None:
    module, _ = families.make("llama", 8)
    session = PlanningSession(module, cluster="1x4xtoy", batch=8, seq=16, phase="decode", dtype="fp32")
    prices = session.priced_baselines()
    assert tuple(price.name for price in prices) == INFERENCE
    plan = session.plan(planner="tp", mesh="tp=4")
    layout = plan.plan["model.layers.*.mlp.down_proj.weight"]
    assert layout == (Shard(1),)


def test_the_best_of_several_baselines() -> None:
    session = session_of("llama", "2x4xtoy")
    names = ("ddp", "fsdp", "hsdp", "fsdp-tp")
    each = {name: step_time_s(session.plan(planner=name)) for name in names}
    best = session.plan(planner="+".join(names))
    assert step_time_s(best) <= min(each.values()) * (1 + GAP)
    simplest = session.plan(planner="+".join(names), tolerance=0.5)
    assert step_time_s(simplest) <= 1.5 * step_time_s(best)
    assert simplest.solver is not None
    assert simplest.solver.name == next(name for name in names if each[name] <= 1.5 * min(each.values()) * (1 + GAP))


def test_the_groups_of_several_reshard_at_one_time() -> None:
    session = session_of("llama", "2x4xtoy")
    plans = {names: session.plan(planner=names) for names in ("fsdp+hsdp", "fsdp+hsdp+keep-gathered")}
    kept = {names: set(plan.keep_gathered) for names, plan in plans.items()}
    assert kept["fsdp+hsdp"] == set()
    assert kept["fsdp+hsdp+keep-gathered"] in (set(), set(plans["fsdp+hsdp+keep-gathered"].fully_shard))
    assert all(not plan.keep_gathered_for_step for plan in plans.values())
    assert step_time_s(plans["fsdp+hsdp+keep-gathered"]) <= step_time_s(plans["fsdp+hsdp"])


def test_the_best_of_several_leaves_out_what_the_cluster_has_no_mesh_for() -> None:
    session = session_of("llama", "1x4xtoy")
    plan = session.plan(planner="hsdp+fsdp")  # one node has no hsdp
    assert plan.solver is not None
    assert plan.solver.name == "fsdp"


def test_where_none_of_several_fits_the_last_says_what_is_missing() -> None:
    session = session_of("llama", "1x4xtoy")
    with pytest.raises(InfeasibleError):
        session.plan(planner="ddp+fsdp+hsdp", memory_bytes=1000)  # one node has no hsdp
    assert session.plan_if_any(planner="ddp+fsdp", memory_bytes=1000) is None


def test_several_baselines_share_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of("llama", "2x4xtoy", time_limit_s=60.0)
    limits = []
    search = PlanningSession._plan_or_least_memory

    def recorded(self: PlanningSession, name: str, *arguments: Any, **options: Any) -> Any:
        limits.append((name, self.spec.time_limit_s))
        return search(self, name, *arguments, **options)

    monkeypatch.setattr(PlanningSession, "_plan_or_least_memory", recorded)
    session.plan(planner="ddp+fsdp+fsdp+keep-gathered")
    assert limits == [("ddp", 20.0), ("fsdp", 20.0), ("fsdp", 20.0)]
    assert session.spec.time_limit_s == 60.0


def test_a_baseline_that_ran_out_of_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of("llama", "1x4xtoy")
    search = PlanningSession._plan_or_least_memory

    def late(self: PlanningSession, name: str, *arguments: Any, **options: Any) -> Any:
        if name == "fsdp" or options.get("excluded"):
            raise SolverError("time was up before any plan was found.")
        return search(self, name, *arguments, **options)

    monkeypatch.setattr(PlanningSession, "_plan_or_least_memory", late)
    plan = session.plan(planner="ddp+fsdp")
    assert plan.solver is not None
    assert plan.solver.name == "ddp"
    with pytest.raises(SolverError, match="time was up"):
        session.plan(planner="fsdp+hsdp")


def test_a_vocabulary_that_does_not_divide_may_leave_the_head_whole() -> None:
    """Also where it could be split unevenly, and so is rounded up."""
    graph = SimpleNamespace(
        parameters={
            "head": ("lm_head.weight",),
            "uneven": ("decoder.weight",),
            "even": ("wte.weight",),
            "block": ("h.0.fc.weight",),
            "conv": ("conv.weight",),
        },
        values={
            "head": SimpleNamespace(shape=(50257, 768)),
            "uneven": SimpleNamespace(shape=(30528, 768)),
            "even": SimpleNamespace(shape=(50304, 768)),
            "block": SimpleNamespace(shape=(3072, 768)),
            "conv": SimpleNamespace(shape=(768, 3, 16, 16)),
        },
        rounded={30528: 30522},
    )
    assert _block_placements(None, graph, 2) == {  # type: ignore[arg-type]
        "lm_head.weight": (Shard(1), R),
        "decoder.weight": (S0, Shard(1), R),
        "wte.weight": (S0, Shard(1)),
        "h.0.fc.weight": (S0, Shard(1)),
        "conv.weight": (R,),
    }
