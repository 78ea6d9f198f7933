"""Opaque modules run on whole tensors or on each rank's samples, and train as the unsharded model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.gloo import run_on_gloo
from support.selected import selected
from support.trained_steps import Errors, errors_in_steps
from support.value_modules import LABELS_ALONE, VALUE_MODULES

from executor import device_mesh_for, local_batch, shard_module
from planner import build_plan
from planner.plan.sharding_plan import ShardingPlan

SPLITS = {
    "experts in a loop": {"blocks.*.experts": "0=0;0"},
    "counts for a child": {"mixer": "0=0;0"},
    "experts that some ranks do not use": {"experts": "0=0;0"},
    "rows found by values": {"": "0=0 1=0;mean"},
    "a derivative by the input": {"": "0=0 1=0;mean"},
    **{name: {} for name in LABELS_ALONE},
    "a branch on a sum": {"": ""},
    "scaled by a buffer": {"scale": ""},
    "stretched by a mask": {"stretch": ""},
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


OPTIONS: dict[str, dict[str, Any]] = {
    "random": {"planner": "random:5"},
    "checkpointed": {"ac": "full"},
    "selective": {"ac": "selective"},
    "any mesh": {"mesh": None},
    "fully-sharded": {"planner": "fully-sharded"},
}
CASES = (
    *VALUE_MODULES,
    *(f"{name}, random" for name in VALUE_MODULES),
    *(f"experts in a loop, {option}" for option in OPTIONS if option != "random"),
)
"""Modules, each with the ILP's plan or with one of other options."""


@pytest.fixture(scope="module")
def plans(request: pytest.FixtureRequest) -> dict[str, ShardingPlan]:
    parts = {case: case.split(", ") for case in selected(request, "case")}
    return {case: plan_of(name, **(OPTIONS[option[0]] if option else {})) for case, (name, *option) in parts.items()}


@pytest.fixture(scope="module")
def errors(plans: dict[str, ShardingPlan]) -> dict[str, Errors]:
    return run_on_gloo(all_errors, 4, {case: (case.split(", ")[0], plan.to_dict()) for case, plan in plans.items()})[0]


@pytest.mark.parametrize("case", CASES)
def test_losses_parameters_and_buffers_are_those_of_the_unsharded_module(errors: dict[str, Errors], case: str) -> None:
    assert max(errors[case]) < 1e-5


@pytest.mark.parametrize("case", VALUE_MODULES)
def test_plans_name_the_opaque_modules_and_are_verified(plans: dict[str, ShardingPlan], case: str) -> None:
    plan = plans[case]
    assert dict(plan.opaque_modules) == SPLITS[case]
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert plan.solver is not None
    assert plan.solver.name == "ilp"


class Rows(torch.nn.Module):
    """Rows that are chosen by their values; a mask, where there is one, has an entry for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        kept = [row for row in range(len(x)) if float(x[row].sum()) < 1e9]
        rows = x[kept] * self.weight
        return rows if mask is None else rows * mask[kept, None]


class MaskedRows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = Rows(), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.out(self.rows(x, mask)), labels)


def masked_rows() -> MaskedRows:
    torch.manual_seed(0)
    return MaskedRows()


def loss_with_a_mask(rank: int, document: dict[str, Any]) -> tuple[float, float]:
    batch = {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), "labels": torch.arange(8) % 4}
    batch["mask"] = torch.arange(8.0)
    plan = ShardingPlan.from_dict(document)
    mesh = device_mesh_for(plan)
    model = shard_module(masked_rows(), mesh, plan)
    return float(model(**local_batch(batch, mesh, plan))), float(masked_rows()(**batch))


def test_an_argument_that_the_planned_call_did_not_have_is_split_by_samples() -> None:
    inputs = {"x": torch.zeros(8, 16), "labels": torch.zeros(8, dtype=torch.long)}
    plan = build_plan(masked_rows(), example_inputs=inputs, cluster="1x4xtoy", mesh="dp=4", dtype="fp32")
    assert dict(plan.opaque_modules) == {"rows": "0=0;0"}
    for sharded, plain in run_on_gloo(loss_with_a_mask, 4, plan.to_dict()):
        assert sharded == pytest.approx(plain, rel=1e-5)
