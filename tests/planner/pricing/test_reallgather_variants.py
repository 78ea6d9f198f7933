"""Activations that are gathered again for the backward: chosen where memory is short, priced as they are written."""

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
"""Where blocks gather their parameters over both axes, nothing is gathered for linear layers."""


@functools.lru_cache(maxsize=4)
def session(reallgather: bool, ac: str = "none", is_pinned: bool = True) -> PlanningSession:
    job: dict[str, Any] = {"micro_batches": 1, "ac": ac, "dtype": "fp32", "memory_gb": 100, "reallgather": reallgather}
    job["pins"] = TENSOR_PARALLEL if is_pinned else []
    return PlanningSession(CASE.make(), cluster="1x4xtoy", example_inputs=inputs_of(CASE), **job)


def short() -> int:
    free = session(False).plan(mesh=MESH).estimate
    assert free is not None
    return int(free.peak_memory_bytes * 0.98)


def seconds(plan: ShardingPlan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_time_s


def kept(plan: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` with nothing gathered again."""

    def once(spec: object) -> object:
        if isinstance(spec, Port):
            return dataclasses.replace(spec, reallgather=False)
        assert isinstance(spec, dict)
        return {name: once(port) for name, port in spec.items()}

    return dataclasses.replace(plan, input_plan={key: once(spec) for key, spec in plan.input_plan.items()})


def test_it_is_chosen_where_memory_is_short_and_is_faster_there() -> None:
    without, found = (session(reallgather).plan(mesh=MESH, memory_bytes=short()) for reallgather in (False, True))
    assert found.reallgathers
    assert not without.reallgathers
    assert seconds(found) < seconds(without)
    again = [port for spec in found.input_plan.values() for _, port in ports_of(spec) if port.reallgather]
    assert all(port.source != port.layout for port in again)


def test_a_plan_is_priced_as_it_is_written_whether_or_not_its_job_says_so() -> None:
    module, inputs = CASE.make(), inputs_of(CASE)
    found = session(True).plan(mesh=MESH, memory_bytes=short())
    read = ShardingPlan.from_dict(found.to_dict())
    by_hand = dataclasses.replace(read, job=dataclasses.replace(read.job, reallgather=False))
    for plan in (read, by_hand):
        assert estimate_plan(module, plan, example_inputs=inputs).estimate == found.estimate


def test_it_costs_a_collective_in_the_backward_and_saves_memory() -> None:
    module, inputs = CASE.make(), inputs_of(CASE)
    found = session(True).plan(mesh=MESH, memory_bytes=short())
    once = estimate_plan(module, kept(found), example_inputs=inputs)
    assert seconds(once) < seconds(found)
    assert once.estimate is not None
    assert found.estimate is not None
    assert once.estimate.peak_memory_bytes > found.estimate.peak_memory_bytes
    gathers = [
        sum(row.count for row in estimate.collectives if (row.kind, row.phase) == ("all_gather", "backward"))
        for estimate in (once.estimate, found.estimate)
    ]
    assert gathers[0] < gathers[1]


def noted(plan: ShardingPlan) -> list[str]:
    return [note for note in plan.notes if "gathered again" in note]


def test_a_plan_says_what_it_gathers_again() -> None:
    found = session(True).plan(mesh=MESH, memory_bytes=short())
    module, inputs = CASE.make(), inputs_of(CASE)
    (note,) = noted(found)
    assert all(key in note for key, spec in found.input_plan.items() if again(spec))
    assert noted(estimate_plan(module, found, example_inputs=inputs)) == [note]
    (note,) = noted(estimate_plan(module, kept(found), example_inputs=inputs))
    assert note == "nothing is gathered again for the backward."
    assert noted(session(False).plan(mesh=MESH)) == []


def test_what_is_not_gathered_for_a_linear_layer_is_refused_by_name() -> None:
    module, inputs = CASE.make(), inputs_of(CASE)
    plan = session(False, is_pinned=False).plan(mesh=MESH, planner="random:3")
    refused: dict[str, str] = {}
    for key, spec in plan.input_plan.items():
        for name, port in ports_of(spec):
            asked: dict[str, Port] = {**dict(ports_of(spec)), name: dataclasses.replace(port, reallgather=True)}
            changed = dataclasses.replace(plan, input_plan={**plan.input_plan, key: asked.get("", asked)})
            try:
                estimate_plan(module, changed, example_inputs=inputs)
            except PlanMismatchError as error:
                refused[key] = str(error)
    assert len(refused) >= 3
    for key, said in refused.items():
        assert key.replace("*", "0") in said
        assert "has reallgather where that cannot be priced" in said


def test_checkpointed_blocks_gather_anyway() -> None:
    for seed in range(3):
        plan = session(True, "full", is_pinned=False).plan(planner=f"random:{seed}", mesh=MESH)
        assert not any(key.startswith("model.layers") for key, spec in plan.input_plan.items() if again(spec))


def again(spec: Any) -> bool:
    return any(port.reallgather for _, port in ports_of(spec))


@pytest.mark.filterwarnings("ignore:Expected a tensor or a traceable:UserWarning")
def test_the_bytes_that_it_saves_are_those_that_a_step_holds_less() -> None:
    found = session(True, is_pinned=False).plan(mesh=MESH, planner="random:1")
    assert found.reallgathers
    once = estimate_plan(CASE.make(), kept(found), example_inputs=inputs_of(CASE))
    held, planned = [], []
    for plan in (once, found):
        assert plan.estimate is not None
        held.append(sum(measure(CASE.make().train(), plan, inputs_of(CASE), StepTracker()).values()))
        planned.append(plan.estimate.peak_memory_bytes)
    assert planned[0] - planned[1] == held[0] - held[1] > 0


def test_inference_keeps_nothing_to_be_gathered_again() -> None:
    module, inputs = make("llama", 8)
    job: dict[str, Any] = {"phase": "prefill", "seq": 16, "dtype": "fp32", "reallgather": True}
    plan = build_plan(module, cluster="1x4xtoy", example_inputs=inputs, mesh="tp=4", planner="random:1", **job)
    assert not plan.reallgathers
    assert plan.notes[-1] == "nothing is gathered again for the backward."
