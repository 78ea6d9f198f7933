"""Re-all-gather: chosen where memory is short, and priced the same from a plan's file."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from memory import StepTracker, measure
from memory_models import CASES, inputs_of
from support.families import make

from planner import PlanningSession, build_plan
from planner.errors import PlanMismatchError
from planner.plan.ports import Port, ports_of
from planner.plan.sharding_plan import ShardingPlan
from planner.writing.reprice import estimate_plan

MESH = "dp=2,tp=2"

CASE = CASES["llama"]

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
TENSOR_PARALLEL = [f"model.layers.*.{name}.weight:used=S(0)@tp" for name in COLUMNS]
"""Pins tensor parallelism: FSDP over both axes would leave no activation to all-gather."""


@functools.lru_cache(maxsize=4)
def session(reallgather: bool, ac: str = "none", is_pinned: bool = True) -> PlanningSession:
    job: dict[str, Any] = {"micro_batches": 1, "ac": ac, "dtype": "fp32", "memory_gb": 100, "reallgather": reallgather}
    job["pins"] = TENSOR_PARALLEL if is_pinned else []
    return PlanningSession(CASE.make(), cluster="1x4xtoy", example_inputs=inputs_of(CASE), **job)


def short_memory_bytes() -> int:
    """Return 98 % of the peak of the best plan without re-all-gather."""
    estimate = session(False).plan(mesh=MESH).estimate
    assert estimate is not None
    return int(estimate.peak_memory_bytes * 0.98)


def seconds(plan: ShardingPlan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_time_s


def without_reallgather(plan: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` with all gathered activations saved for backward."""

    def saved(spec: object) -> object:
        if isinstance(spec, Port):
            return dataclasses.replace(spec, reallgather=False)
        assert isinstance(spec, dict)
        return {name: saved(port) for name, port in spec.items()}

    return dataclasses.replace(plan, input_plan={key: saved(spec) for key, spec in plan.input_plan.items()})


def test_reallgather_is_chosen_where_memory_is_short_and_makes_the_step_faster() -> None:
    without, plan = (
        session(reallgather).plan(mesh=MESH, memory_bytes=short_memory_bytes()) for reallgather in (False, True)
    )
    assert plan.reallgathers
    assert not without.reallgathers
    assert seconds(plan) < seconds(without)
    ports = [port for spec in plan.input_plan.values() for _, port in ports_of(spec) if port.reallgather]
    assert all(port.source != port.layout for port in ports)


def test_a_plans_price_does_not_depend_on_the_job_field() -> None:
    module, inputs = CASE.make(), inputs_of(CASE)
    plan = session(True).plan(mesh=MESH, memory_bytes=short_memory_bytes())
    read = ShardingPlan.from_dict(plan.to_dict())
    by_hand = dataclasses.replace(read, job=dataclasses.replace(read.job, reallgather=False))
    for other in (read, by_hand):
        assert estimate_plan(module, other, example_inputs=inputs).estimate == plan.estimate


def test_reallgather_costs_collectives_in_the_backward_and_saves_memory() -> None:
    module, inputs = CASE.make(), inputs_of(CASE)
    plan = session(True).plan(mesh=MESH, memory_bytes=short_memory_bytes())
    without = estimate_plan(module, without_reallgather(plan), example_inputs=inputs)
    assert seconds(without) < seconds(plan)
    assert without.estimate is not None
    assert plan.estimate is not None
    assert without.estimate.peak_memory_bytes > plan.estimate.peak_memory_bytes
    gathers = [
        sum(row.count for row in estimate.collectives if (row.kind, row.phase) == ("all_gather", "backward"))
        for estimate in (without.estimate, plan.estimate)
    ]
    assert gathers[0] < gathers[1]


def reallgather_notes(plan: ShardingPlan) -> list[str]:
    return [note for note in plan.notes if "gathered again in the backward" in note]


def test_the_notes_name_the_inputs_with_reallgather() -> None:
    plan = session(True).plan(mesh=MESH, memory_bytes=short_memory_bytes())
    module, inputs = CASE.make(), inputs_of(CASE)
    (note,) = reallgather_notes(plan)
    assert all(key in note for key, spec in plan.input_plan.items() if has_reallgather(spec))
    assert reallgather_notes(estimate_plan(module, plan, example_inputs=inputs)) == [note]
    (note,) = reallgather_notes(estimate_plan(module, without_reallgather(plan), example_inputs=inputs))
    assert note == "no input is all-gathered again in the backward."
    assert reallgather_notes(session(False).plan(mesh=MESH)) == []


@pytest.mark.slow
def test_reallgather_where_no_all_gather_precedes_a_linear_layer_is_an_error() -> None:
    module, inputs = CASE.make(), inputs_of(CASE)
    plan = session(False, is_pinned=False).plan(mesh=MESH, planner="random:3")
    messages: dict[str, str] = {}
    for key, spec in plan.input_plan.items():
        for name, port in ports_of(spec):
            ports: dict[str, Port] = {**dict(ports_of(spec)), name: dataclasses.replace(port, reallgather=True)}
            changed = dataclasses.replace(plan, input_plan={**plan.input_plan, key: ports.get("", ports)})
            try:
                estimate_plan(module, changed, example_inputs=inputs)
            except PlanMismatchError as error:
                messages[key] = str(error)
    assert len(messages) >= 3
    for key, message in messages.items():
        assert key.replace("*", "0") in message
        assert "has reallgather where that cannot be priced" in message


def test_checkpointed_blocks_have_no_reallgather() -> None:
    for seed in range(3):
        plan = session(True, "full", is_pinned=False).plan(planner=f"random:{seed}", mesh=MESH)
        assert not any(key.startswith("model.layers") for key, spec in plan.input_plan.items() if has_reallgather(spec))


def has_reallgather(spec: Any) -> bool:
    return any(port.reallgather for _, port in ports_of(spec))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Expected a tensor or a traceable:UserWarning")
def test_the_planned_saving_is_measured_in_a_step() -> None:
    plan = session(True, is_pinned=False).plan(mesh=MESH, planner="random:1")
    assert plan.reallgathers
    without = estimate_plan(CASE.make(), without_reallgather(plan), example_inputs=inputs_of(CASE))
    measured, planned = [], []
    for each in (without, plan):
        assert each.estimate is not None
        measured.append(sum(measure(CASE.make().train(), each, inputs_of(CASE), StepTracker()).values()))
        planned.append(each.estimate.peak_memory_bytes)
    assert planned[0] - planned[1] == measured[0] - measured[1] > 0


def test_inference_saves_no_activations_and_has_no_reallgather() -> None:
    module, inputs = make("llama", 8)
    job: dict[str, Any] = {"phase": "prefill", "seq": 16, "dtype": "fp32", "reallgather": True}
    plan = build_plan(module, cluster="1x4xtoy", example_inputs=inputs, mesh="tp=4", planner="random:1", **job)
    assert not plan.reallgathers
    assert plan.notes[-1] == "no input is all-gathered again in the backward."
