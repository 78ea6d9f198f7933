"""Modules as people write them: their plans run as planned, and train as the unsharded modules, on four processes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.any_modules import MODULES
from support.gloo import run_on_gloo
from support.selected import selected
from support.trained_steps import Errors, errors_in_steps
from torch import nn

from executor.verify import verify
from planner import build_plan
from planner.plan.sharding_plan import ShardingPlan

MESH = "dp=2,tp=2"


def made(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    module, inputs = MODULES[name]()
    assert isinstance(inputs, tuple)
    return module.train(), inputs


@functools.cache
def plan_of(name: str, planner: str = "ilp") -> ShardingPlan:
    module, inputs = made(name)
    options: dict[str, Any] = {"cluster": "1x4xtoy", "mesh": MESH, "dtype": "fp32", "micro_batches": 1, "ac": "none"}
    return build_plan(module, example_inputs=inputs, planner=planner, tolerance=0.0, **options)


def all_errors(rank: int, plans: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Errors]:
    return {
        key: errors_in_steps(ShardingPlan.from_dict(text), functools.partial(made, name))
        for key, (name, text) in plans.items()
    }


RANDOM = (
    "bags",
    "a child's weight",
    "a sibling's weight",
    "a tied bias",
    "a tied vector that is cast",
    "two streams",
    "shared queries",
    "scores and places",
    "a mask of its type",
    "one weight twice",
    "identity",
    "conv1d",
    "GRU with a state",
    "a block in a loop",
    "complex numbers",
    "two towers",
    "windows",
    "rotated features",
    "rolled tokens",
    "statistics of the batch",
)
"""Modules that are also run under plans with random layouts, of which each is another combination."""

_RANDOM = ", random"


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, Errors]:
    plans = {}
    for case in selected(request, "name"):
        name = case.removesuffix(_RANDOM)
        plans[case] = name, plan_of(name, *(["random:3"] if case != name else [])).to_dict()
    return run_on_gloo(all_errors, 4, plans)[0]


@pytest.mark.parametrize("name", [*MODULES, *(name + _RANDOM for name in RANDOM)])
def test_losses_and_parameters_are_those_of_the_unsharded_module(errors: dict[str, Errors], name: str) -> None:
    assert errors[name].loss < 1e-5
    assert errors[name].parameter < 1e-5


@pytest.mark.parametrize("name", MODULES)
def test_plans_are_verified(name: str) -> None:
    plan = plan_of(name)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert plan.solver is not None
    assert plan.solver.name == "ilp"


def test_a_long_loss_is_no_reason_to_run_the_model_as_one_op() -> None:
    assert not plan_of("preferences").opaque_modules


def test_samples_are_compared_with_those_of_other_ranks_after_they_are_pooled() -> None:
    module, inputs = made("two towers")
    plan = build_plan(module, cluster="1x4xtoy", mesh="dp=4", example_inputs=inputs, planner="ddp", dtype="fp32")
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    # Nothing is gathered but one tower's vectors, [8, 16] in fp32.
    gathered = {each.bytes for each in plan.estimate.collectives if each.kind == "all_gather"}
    assert gathered == {8 * 16 * 4}


def test_what_is_not_called_has_no_fsdp_group() -> None:
    plan = plan_of("lists of lists", "fully-sharded")
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert not plan.fully_shard


@pytest.mark.parametrize("name", ["shared queries", "scores and places"])
@pytest.mark.parametrize("seed", [0, 4, 7, 11, 13])
def test_random_plans_run_as_planned(name: str, seed: int) -> None:
    plan = plan_of(name, f"random:{seed}")
    module, inputs = made(name)
    assert verify(module, plan, inputs).equal
