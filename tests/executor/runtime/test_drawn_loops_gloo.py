"""Drawn training loops on four ranks: losses, gradients, parameters, buffers and optimizer states as unsharded.

A draw has a model and a plan, and steps of any number of backward passes, between which the loop evaluates, reads or
clears gradients, freezes modules, clips, moves the model, and resumes from a checkpoint under another plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import families
from support.executor_cases import BATCH, Case
from support.gloo import GlooRanks
from support.loop_plans import FAMILIES, PLANS, plans_of
from support.own_loops import OPTIMIZERS, Loop, Step, differences

from planner.plan.sharding_plan import ShardingPlan
from planner.session import PlanningSession
from planner.verification.verify_plan import local_modules_of

PLANNED = ("planned", "planned, fully sharded")
"""Plans that the planner makes for Llama, on 4 ranks with slow links."""


def name_of(family: str, plan: str, micro_batches: int) -> str:
    return f"{family}/{plan}/{micro_batches}"


def case_of(name: str, planned: dict[str, dict[str, Any]]) -> Case:
    family, plan, micro_batches = name.split("/")
    if plan in PLANNED:
        return Case(family, ShardingPlan.from_dict(planned[plan]))
    return PLANS[plan](family, int(micro_batches))


def run(rank: int, loop: Loop, planned: dict[str, dict[str, Any]]) -> list[str]:
    return differences(loop, lambda name: case_of(name, planned))


def steps(others: list[str], most_passes: int) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        passes=st.integers(1, most_passes),
        announced=st.integers(0, 4),
        evaluates=st.booleans(),
        reads=st.booleans(),
        clears=st.sampled_from(("", "", "", "model", "optimizer", "zeros")),
        clears_late=st.booleans(),
        frozen=st.one_of(st.none(), st.none(), st.integers(0, 20)),
        clip=st.sampled_from((0.0, 0.5)),
        moves=st.booleans(),
        resumes_under=st.sampled_from(("", "", *others)),
    )


@st.composite
def loops(draw: st.DrawFn, families: Sequence[str] = FAMILIES, most_steps: int = 4, most_passes: int = 4) -> Loop:
    family = draw(st.sampled_from(families))
    plans = [*plans_of(family), *(PLANNED if family == "llama" else ())]  # Llama is drawn in the slow test alone
    names = [name_of(family, draw(st.sampled_from(plans)), draw(st.integers(1, 4))) for _ in range(2)]
    drawn = draw(st.lists(steps(names, most_passes), min_size=1, max_size=most_steps))
    if any(step.frozen is not None for step in drawn):
        # torch's get_state_dict wants a state of every parameter, and a frozen one has none.
        drawn = [dataclasses.replace(step, resumes_under="") for step in drawn]
    return Loop(
        case=names[0],
        steps=tuple(drawn),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        decays=draw(st.booleans()),
    )


class Planned(dict[str, dict[str, Any]]):
    """Plans as data by name; in the report of a failure, their names."""

    def __repr__(self) -> str:
        return f"Planned({', '.join(self)})"


@pytest.fixture(scope="module")
def planned() -> Planned:
    module, inputs = families.make("llama", BATCH)
    cluster = {
        "nodes": 4,
        "devices_per_node": 1,
        "device": "toy",
        "inter_node": {"bandwidth_bytes_per_s": 1e7},
    }
    job: dict[str, Any] = {"micro_batches": 2, "ac": "none", "dtype": "fp32"}
    session = PlanningSession(module, cluster=cluster, example_inputs=inputs, **job)
    plans = {
        "planned": session.plan(mesh="dp=2,tp=2"),
        "planned, fully sharded": session.plan(planner="fully-sharded", mesh="dp=4"),
    }
    local = {name: local_modules_of(module, plan, session.inputs) for name, plan in plans.items()}
    assert "model.layers.*" in local["planned, fully sharded"]
    return Planned({name: session.with_local_modules(plan, local[name]).to_dict() for name, plan in plans.items()})


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(4) as started:
        yield started


def check(ranks: GlooRanks, loop: Loop, planned: dict[str, dict[str, Any]]) -> None:
    by_rank = ranks.call(run, loop, dict(planned))
    assert by_rank == [[]] * 4


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(loop=loops(families=("mlp", "gpt2"), most_steps=2, most_passes=3))
def test_a_drawn_loop_ends_as_the_unsharded_one(ranks: GlooRanks, loop: Loop) -> None:
    check(ranks, loop, {})


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(loop=loops())
def test_many_drawn_loops_end_as_the_unsharded_ones(ranks: GlooRanks, planned: Planned, loop: Loop) -> None:
    check(ranks, loop, planned)
