"""The cap on a plan's peak: the device's memory less the headroom, or what the user gives; recorded in the plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rich.console import Console
from support import families

from api.render.plan import show_plan
from cost_model import ClusterSpec, find_device, reserve_by_role
from cost_model.kernels.optimizer_memory import RESERVE_ROLES
from planner.errors import InfeasibleError
from planner.session import PlanningSession
from planner.writing.reprice import estimate_plan

JOB: dict[str, Any] = {"cluster": "1x4xtoy", "dtype": "fp32", "ac": "none"}
CAPACITY = ClusterSpec.parse("1x4xtoy").memory_bytes


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any]:
    return families.make("mlp", 8)


def session(model: tuple[Any, Any], **options: Any) -> PlanningSession:
    return PlanningSession(model[0], example_inputs=model[1], **JOB, **options)


@pytest.mark.parametrize("headroom", [None, 0.25, 0.0])
def test_a_plan_states_the_cap_and_its_headroom(model: tuple[Any, Any], headroom: float | None) -> None:
    options = {} if headroom is None else {"headroom": headroom}
    plan = session(model, **options).plan(mesh="dp=4")
    expected = 0.08 if headroom is None else headroom
    assert (plan.job.headroom, plan.job.memory_bytes) == (expected, round(CAPACITY * (1 - expected)))


def test_memory_gb_is_the_cap_itself(model: tuple[Any, Any]) -> None:
    plan = session(model, memory_gb=CAPACITY / 1e9, headroom=0.5).plan(mesh="dp=4")
    assert (plan.job.headroom, plan.job.memory_bytes) == (0.0, CAPACITY)


def test_memory_of_others_comes_off_before_the_headroom(model: tuple[Any, Any]) -> None:
    cluster = {"devices_per_node": 4, "device": "toy", "reserved_gb": 0.01}
    planned = PlanningSession(model[0], example_inputs=model[1], **{**JOB, "cluster": cluster})
    assert planned.plan(mesh="dp=4").job.memory_bytes == round((CAPACITY - 10_000_000) * 0.92)


def test_no_plan_is_given_between_the_cap_and_the_capacity(model: tuple[Any, Any]) -> None:
    least_bytes = session(model).least_memory_bytes(mesh="dp=4")
    assert least_bytes is not None
    device = {"like": "toy", "name": "tight", "memory_bytes": round(least_bytes * 1.04)}
    job = {**JOB, "cluster": {"devices_per_node": 4, "device": device}, "example_inputs": model[1]}
    with pytest.raises(InfeasibleError) as refused:
        PlanningSession(model[0], **job).plan(mesh="dp=4")
    assert refused.value.budget_bytes == round(round(least_bytes * 1.04) * 0.92)
    assert PlanningSession(model[0], **job, headroom=0.0).plan(mesh="dp=4").job.memory_bytes == device["memory_bytes"]


def test_a_cap_for_one_plan_has_no_headroom(model: tuple[Any, Any]) -> None:
    plan = session(model).plan(mesh="dp=4", memory_bytes=CAPACITY // 2)
    assert (plan.job.headroom, plan.job.memory_bytes) == (0.0, CAPACITY // 2)


def test_a_plan_that_is_priced_again_keeps_its_cap(model: tuple[Any, Any]) -> None:
    plan = session(model, headroom=0.2).plan(mesh="dp=4")
    other = ClusterSpec.parse({"devices_per_node": 4, "device": {"like": "toy", "memory_bytes": 1e9}})
    for cluster in (None, other):
        again = estimate_plan(model[0], plan, example_inputs=model[1], cluster=cluster)
        assert (again.job.headroom, again.job.memory_bytes) == (0.2, plan.job.memory_bytes)


def test_the_memory_of_a_plan_names_allocator_and_context(model: tuple[Any, Any]) -> None:
    planned = PlanningSession(model[0], example_inputs=model[1], **{**JOB, "cluster": "1x4xl4-24gb"})
    estimate = planned.plan(mesh="dp=4").estimate
    assert estimate is not None
    assert {role: estimate.memory[role] for role in RESERVE_ROLES} == reserve_by_role(find_device("l4-24gb"))
    assert sum(estimate.memory.values()) == estimate.peak_memory_bytes


def test_the_print_shows_peak_cap_headroom_and_capacity(
    model: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = session(model, headroom=0.25).plan(mesh="dp=4")
    show_plan(plan, Console(width=200))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  memory ")]
    assert " of 64.0 MB " in line
    assert line.endswith("headroom of 25 % kept")
    show_plan(dataclasses.replace(plan, job=dataclasses.replace(plan.job, headroom=0.0)), Console(width=200))
    assert "headroom" not in capsys.readouterr().out
