"""The estimator's price of a written plan, read back from its file, is the price that the solver saw: always."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import families
from torch import nn

from planner.build import build_plan
from planner.errors import PlanMismatchError
from planner.formulation.estimate import estimate
from planner.graph.trace_module import ModuleNames
from planner.plan.sharding_plan import Estimate, ShardingPlan
from planner.session import PlanningSession
from planner.writing.reprice import estimate_plan, read_plan

BATCH = 8
MESHES = ("dp=2,tp=2", "dp=1,tp=4")
PLANNERS = ("ilp", "data-parallel", "fully-sharded", "random:0")
COLUMN_ROW = {"fc1": "colwise", "fc2": "rowwise"}


def session_of(
    family: str, micro_batches: int = 1, ac: str = "none", cluster: str | dict[str, Any] = "4xtoy"
) -> tuple[nn.Module, dict[str, Any], PlanningSession]:
    module, kwargs = families.make(family, BATCH)
    session = PlanningSession(
        module,
        cluster=cluster,
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
    read = read_plan(session._planner, plan, ModuleNames.from_module(module))
    return estimate(read.formulator, read.structure, read.decision)


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


@pytest.mark.parametrize(
    "family", [*families.FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in families.WITH_EXPERTS)]
)
def test_every_plan_is_priced_alike_from_its_file(family: str) -> None:
    module, kwargs, session = session_of(family)
    steps: dict[str, float] = {}
    for mesh in MESHES:
        extra = ("tensor-parallel",) if family in ("llama", "mlp", *families.WITH_EXPERTS) else ()
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
    phases = {}
    for planner in ("ilp", "fully-sharded", "random:0", "random:1"):
        plan = session.plan(planner=planner, mesh=MESHES[0])
        check(session, module, plan)
        assert set(plan.activation_checkpointing.values()) == {ac}
        assert plan.estimate is not None
        phases[planner] = {row.phase for row in plan.estimate.collectives}
    # Blocks that gather over both axes ahead of their work repeat no communication; those of random plans do.
    assert phases["random:0"] | phases["random:1"] >= {"recompute", "grad_reduce"}


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


def waiting(host_op_s: float, first_touch_s_per_byte: float = 0.0, overlaps: bool = False) -> dict[str, Any]:
    """Four devices that wait for their host."""
    figures = {"host_op_s": host_op_s, "first_touch_s_per_byte": first_touch_s_per_byte, "overlaps": overlaps}
    return {"nodes": 1, "devices_per_node": 4, "device": {"name": "toy", **figures}}


@pytest.mark.parametrize("planner", ["ilp", "fully-sharded", "random:0"])
@pytest.mark.parametrize("ac", ["none", "full"])
def test_what_the_host_takes_is_in_the_objective_too(planner: str, ac: str) -> None:
    module, _, session = session_of("llama", micro_batches=2, ac=ac, cluster=waiting(1e-5, 1e-9))
    check(session, module, session.plan(planner=planner, mesh="dp=2,tp=2"))


def test_the_host_is_charged_for_every_op_and_collective() -> None:
    step_s, calls = [], []
    for host_op_s in (1e-3, 2e-3):
        _, _, session = session_of("mlp", cluster=waiting(host_op_s))
        plan = session.plan(planner="data-parallel", mesh="dp=4,tp=1")
        assert plan.estimate is not None
        step_s.append(plan.estimate.step_time_s)
        calls.append(sum(row.count for row in plan.estimate.collectives))
        ops = session._planner.model.structure(BATCH).profile.ops.values()
        dispatched = sum(op.forward_dispatched.ops + op.backward_dispatched.ops + len(op.autograd_sums) for op in ops)
    assert calls[0] == calls[1]
    assert step_s[1] - step_s[0] == pytest.approx(1e-3 * (dispatched + 4 * calls[0]))


def test_new_memory_is_charged_to_what_blocks_gather() -> None:
    found = []
    for first_touch_s_per_byte in (0.0, 1e-10):
        _, _, session = session_of("llama", cluster=waiting(1e-9, first_touch_s_per_byte, overlaps=True))
        plan = session.plan(planner="fully-sharded", mesh="dp=4,tp=1")
        assert plan.estimate is not None
        assert plan.fully_shard
        rows = [row for row in plan.estimate.collectives if row.phase in ("forward", "backward")]
        (flat,) = {row.bytes for row in rows if row.kind == "reduce_scatter"}
        together = [row for row in rows if row.bytes == flat and row.kind in ("all_gather", "reduce_scatter")]
        found.append((sum(row.time_s for row in together), sum(row.bytes * row.count for row in together)))
    (before_s, nbytes), (after_s, _) = found
    assert after_s - before_s == pytest.approx(1e-10 * nbytes)
