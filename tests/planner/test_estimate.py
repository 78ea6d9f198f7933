"""The estimator's price of a written plan, read back from its file, is the price that the solver saw: always."""

from __future__ import annotations

import json
from typing import Any

import families
import pytest
from torch import nn

from planner.assemble import decision_from_plan
from planner.errors import PlanMismatchError
from planner.estimate import estimate
from planner.opened_plan import estimate_plan
from planner.plan import Estimate, ShardingPlan
from planner.session import PlanningSession, build_plan
from planner.traced_module import ModuleNames

BATCH = 8
MESHES = ("dp=2,tp=2", "dp=1,tp=4")
PLANNERS = ("ilp", "data-parallel", "fully-sharded", "random:0")
COLUMN_ROW = {"fc1": "colwise", "fc2": "rowwise"}


def session_of(
    family: str, micro_batches: int = 1, ac: str = "none"
) -> tuple[nn.Module, dict[str, Any], PlanningSession]:
    module, kwargs = families.make(family, BATCH)
    session = PlanningSession(
        module,
        cluster="4xtoy",
        example_inputs=kwargs,
        dtype="fp32",
        micro_batches=micro_batches,
        ac=ac,
        tp_plan=COLUMN_ROW if family == "mlp" else None,
    )
    return module, kwargs, session


def round_trip(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan as its file gives it back, without what it says about its own cost."""
    document = json.loads(plan.to_json()) | {"estimate": None, "solver": None}
    return ShardingPlan.from_dict(document)


def reprice(session: PlanningSession, module: nn.Module, plan: ShardingPlan) -> Estimate:
    """Do as `estimate_plan` does, but on the session's trace."""
    search = session._search
    mode = next(iter(plan.activation_checkpointing.values()), "none")
    formulator, layer = search.formulator(search.run_of(plan.mesh.spec, plan.micro_batches, mode))
    return estimate(formulator, layer, decision_from_plan(layer, formulator, plan, ModuleNames.of(module)))


def check(session: PlanningSession, module: nn.Module, plan: ShardingPlan) -> None:
    found = reprice(session, module, round_trip(plan))
    assert plan.estimate is not None
    assert plan.solver is not None
    assert found.collectives == plan.estimate.collectives
    assert found.memory == plan.estimate.memory
    assert found.peak_memory_bytes == plan.estimate.peak_memory_bytes == sum(found.memory.values())
    assert found.step_time_s == pytest.approx(plan.estimate.step_time_s, rel=1e-12)
    assert found == plan.estimate
    if plan.solver.objective_s is not None:
        assert plan.solver.objective_s == pytest.approx(found.step_time_s, rel=1e-9)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_plan_is_priced_alike_from_its_file(family: str) -> None:
    module, kwargs, session = session_of(family)
    steps: dict[str, float] = {}
    for mesh in MESHES:
        extra = ("tensor-parallel",) if family in ("llama", "mlp") else ()
        extra += ("random:1", "random:2") if mesh == MESHES[1] else ()
        for planner in (*PLANNERS, *extra):
            plan = session.plan(planner=planner, mesh=mesh)
            check(session, module, plan)
            assert plan.estimate is not None
            steps[planner] = plan.estimate.step_time_s
            if planner == "ilp":
                assert plan.estimate.collectives, "a plan without collectives proves nothing"
        assert all(steps["ilp"] <= step * (1 + 1e-3) for step in steps.values()), steps
    priced = estimate_plan(module, round_trip(plan), example_inputs=kwargs)
    assert priced.estimate == plan.estimate


@pytest.mark.parametrize(("family", "micro_batches", "ac"), [("gpt2", 2, "selective"), ("llama", 2, "full")])
def test_micro_batches_and_checkpointing_are_priced_alike(family: str, micro_batches: int, ac: str) -> None:
    module, _, session = session_of(family, micro_batches, ac)
    for planner in ("ilp", "fully-sharded", "random:0"):
        plan = session.plan(planner=planner, mesh=MESHES[0])
        check(session, module, plan)
        assert set(plan.activation_checkpointing.values()) == {ac}
        assert plan.estimate is not None
        if planner == "fully-sharded":
            assert {row.phase for row in plan.estimate.collectives} >= {"recompute", "grad_reduce"}


def test_a_plan_for_another_model_is_refused() -> None:
    module, kwargs = families.make("mlp", BATCH)
    plan = build_plan(module, cluster="4xtoy", example_inputs=kwargs, mesh="dp=4", planner="data-parallel")
    other = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(PlanMismatchError, match="another model"):
        estimate_plan(other, plan, example_inputs=kwargs)


def test_layouts_that_cannot_run_are_refused() -> None:
    module, kwargs = families.make("mlp", BATCH)
    plan = build_plan(module, cluster="4xtoy", example_inputs=kwargs, mesh="dp=4", planner="data-parallel")
    document = json.loads(plan.to_json())
    document["plan"]["fc2.weight"] = ["S(0)"]
    with pytest.raises(PlanMismatchError, match="cannot run without further redistribution"):
        estimate_plan(module, ShardingPlan.from_dict(document), example_inputs=kwargs)
