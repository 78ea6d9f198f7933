"""Opaque modules run on whole tensors or on each rank's samples, and train as the unsharded model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.gloo import run_on_gloo
from support.trained_steps import Errors, errors_in_steps
from support.value_modules import VALUE_MODULES

from planner import build_plan
from planner.plan.sharding_plan import ShardingPlan

SPLITS = {
    "experts in a loop": {"blocks.*.experts": "0=0;0"},
    "experts that some ranks do not use": {"experts": "0=0;0"},
    "rows found by values": {"": "0=0 1=0;mean"},
    "labels that are counted": {"": ""},
    "labels of which one is padding": {"": ""},
    "a branch on a sum": {"": ""},
    "scaled by a buffer": {"scale": ""},
}


def made(name: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    module, inputs = VALUE_MODULES[name]()
    return module.train(), inputs


def plan_of(name: str, planner: str = "ilp", **options: Any) -> ShardingPlan:
    module, inputs = made(name)
    given = {"cluster": "1x4xtoy", "mesh": "dp=2,tp=2", "dtype": "fp32", "micro_batches": 1, **options}
    return build_plan(module, example_inputs=inputs, planner=planner, **given)


def all_errors(rank: int, plans: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Errors]:
    return {
        key: errors_in_steps(ShardingPlan.from_dict(text), functools.partial(made, name))
        for key, (name, text) in plans.items()
    }


@pytest.fixture(scope="module")
def plans() -> dict[str, ShardingPlan]:
    return {
        **{name: plan_of(name) for name in VALUE_MODULES},
        **{f"{name}, random": plan_of(name, "random:5") for name in VALUE_MODULES},
        "experts in a loop, checkpointed": plan_of("experts in a loop", ac="full"),
        "experts in a loop, selective": plan_of("experts in a loop", ac="selective"),
        "experts in a loop, any mesh": plan_of("experts in a loop", mesh=None),
        "experts in a loop, fully-sharded": plan_of("experts in a loop", "fully-sharded"),
    }


@pytest.fixture(scope="module")
def errors(plans: dict[str, ShardingPlan]) -> dict[str, Errors]:
    return run_on_gloo(all_errors, 4, {key: (key.split(", ")[0], plan.to_dict()) for key, plan in plans.items()})[0]


def test_losses_parameters_and_buffers_are_those_of_the_unsharded_module(
    errors: dict[str, Errors],
) -> None:
    assert {key: values for key, values in errors.items() if max(values) >= 1e-5} == {}


@pytest.mark.parametrize("name", VALUE_MODULES)
def test_plans_name_the_opaque_modules_and_are_verified(plans: dict[str, ShardingPlan], name: str) -> None:
    plan = plans[name]
    assert dict(plan.opaque_modules) == SPLITS[name]
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert plan.solver is not None
    assert plan.solver.name == "ilp"
