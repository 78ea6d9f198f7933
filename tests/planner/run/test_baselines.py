"""The baselines are what their names say, absent where they do not exist, and random plans repeat by seed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from support import families
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from cost_model.layouts.layout import Layout
from planner.errors import BaselineError
from planner.plan.ports import ports_of
from planner.plan.sharding_plan import ShardingPlan
from planner.planners import DataParallelPlanner, RandomPlanner, TensorParallelPlanner
from planner.run.baselines import NAMES, parse_planner
from planner.session import PlanningSession

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@cache
def model(family: str) -> tuple[nn.Module, dict[str, Any]]:
    return families.make(family, 8)


@cache
def session(family: str) -> PlanningSession:
    module, kwargs = model(family)
    return PlanningSession(module, cluster="4xtoy", example_inputs=kwargs, dtype="fp32", micro_batches=1, ac="none")


def parameters(plan: ShardingPlan) -> dict[str, Layout]:
    return {name: layout for name, layout in plan.plan.items() if not isinstance(layout, str)}


def input_layouts(plan: ShardingPlan) -> set[Layout]:
    root = plan.input_plan.get("input", plan.input_plan.get(""))
    assert root is not None
    return {port.layout for _, port in ports_of(root) if port.layout is not None}


def phases(plan: ShardingPlan) -> dict[str, set[str]]:
    assert plan.estimate is not None
    found: dict[str, set[str]] = {}
    for row in plan.estimate.collectives:
        found.setdefault(row.phase, set()).add(row.kind)
    return found


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
def test_data_parallel(mesh: str) -> None:
    plan = session("mlp").plan(planner="data-parallel", mesh=mesh)
    axes = mesh.count("=")
    assert set(parameters(plan).values()) == {(R,) * axes}
    assert not plan.compute_plan
    assert input_layouts(plan) == {(S0,) * axes}
    assert phases(plan)["grad_reduce"] <= {"all_reduce", "reduce_scatter", "all_gather"}
    assert "backward" not in phases(plan)


def test_fully_sharded() -> None:
    plan = session("mlp").plan(planner="fully-sharded", mesh="dp=2,tp=2")
    assert set(parameters(plan).values()) == {(S0, S0)}
    assert set(plan.compute_plan.values()) == {(R, R)}
    assert set(plan.compute_plan) == set(plan.plan)
    assert input_layouts(plan) == {(S0, S0)}
    found = phases(plan)
    assert "all_gather" in found["forward"]
    assert found["grad_reduce"] == {"reduce_scatter"}


def test_tensor_parallel_is_the_experts_plan() -> None:
    plan = session("llama").plan(planner="tensor-parallel", mesh="dp=2,tp=2")
    stored = parameters(plan)
    for name, placement in {"q_proj": S0, "k_proj": S0, "v_proj": S0, "o_proj": S1}.items():
        assert stored[f"model.layers.*.self_attn.{name}.weight"] == (R, placement)
    for name, placement in {"gate_proj": S0, "up_proj": S0, "down_proj": S1}.items():
        assert stored[f"model.layers.*.mlp.{name}.weight"] == (R, placement)
    assert stored["model.norm.weight"] == (R, R)
    assert input_layouts(plan) == {(S0, R)}
    assert "all_reduce" in phases(plan)["forward"]


@pytest.mark.parametrize("family", ["mlp", "gpt2", "vit"])
def test_no_tensor_parallel_where_the_model_has_no_plan(family: str) -> None:
    with pytest.raises(BaselineError, match="no tensor-parallel plan"):
        session(family).plan(planner="tensor-parallel", mesh="dp=2,tp=2")


def test_styles_that_match_nothing_known_are_refused() -> None:
    module, kwargs = model("mlp")
    planner = TensorParallelPlanner(
        cluster="4xtoy", example_inputs=kwargs, mesh="dp=2,tp=2", tp_plan={"fc1": "mystery"}, dtype="fp32"
    )
    with pytest.raises(BaselineError, match="mystery"):
        planner.build_plan(module)


def test_names() -> None:
    assert parse_planner("ilp") == ("ilp", None)
    assert [parse_planner(name) for name in NAMES] == [(name, None) for name in NAMES]
    assert parse_planner("random:17") == ("random", 17)
    for joined in ("ddp+fsdp", "fsdp+hsdp+keep-gathered"):
        assert parse_planner(joined) == (joined, None)
    for name in (
        "",
        "random",
        "random:",
        "random:-1",
        "ILP",
        "zero",
        "ddp+",
        "ddp+ilp",
        "ddp+data-parallel",
        "keep-gathered",
    ):
        with pytest.raises(BaselineError, match="there is no planner"):
            parse_planner(name)


def test_random_plans_repeat_by_seed_and_differ_between_seeds() -> None:
    def entries(plan: ShardingPlan) -> tuple[Any, ...]:
        return plan.plan, plan.compute_plan, plan.input_plan, plan.output_plan

    first = {seed: entries(session("mlp").plan(planner=f"random:{seed}", mesh="dp=2,tp=2")) for seed in range(4)}
    module, kwargs = model("mlp")
    for seed in (0, 3):
        planner = RandomPlanner(cluster="4xtoy", example_inputs=kwargs, mesh="dp=2,tp=2", seed=seed, dtype="fp32")
        assert entries(planner.build_plan(module)) == first[seed]
    assert len({str(item) for item in first.values()}) == 4


def test_a_planner_object_gives_the_sessions_plan() -> None:
    module, kwargs = model("mlp")
    planner = DataParallelPlanner(
        cluster="4xtoy", example_inputs=kwargs, mesh="dp=4", micro_batches=1, ac="none", dtype="fp32"
    )
    plan, same = planner.build_plan(module), session("mlp").plan(planner="data-parallel", mesh="dp=4")
    assert (plan.plan, plan.input_plan, plan.estimate) == (same.plan, same.input_plan, same.estimate)
    assert plan.solver is not None
    assert plan.solver.name == "data-parallel"
