"""Conversions, loaded state dicts and replaced parameters of a sharded module, on four real processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.executor_cases import Case, fully_sharded, loss_of, make_batch, make_model
from support.fsdp_cases import CASES as FSDP_CASES
from support.gloo import run_on_gloo
from support.own_loops import TOLERANCE, full
from torch import nn

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner.errors import PlanMismatchError
from planner.plan.job import Job

MIXED = Job(dtype="bf16", optimizer="sgd", reduce_dtype="fp32")
"""Parameters are stored in fp32; modules see them in bf16."""
CASES: dict[str, Callable[[], Case]] = {
    "no groups": lambda: fully_sharded("mlp"),
    "FSDP": FSDP_CASES["mlp"],
    "for the step": FSDP_CASES["mlp, for the step, 4 micro-batches"],
    "for the step, reduced on tp afterwards": FSDP_CASES["mlp, for the step, reduced on tp afterwards"],
}
VARIANTS = {"FSDP", "for the step"}
PARAMETERS = [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in CASES]
REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to a dtype": lambda model: model.to(torch.float16),
    "to meta": lambda model: model.to("meta"),
    "to_empty on meta": lambda model: model.to_empty(device="meta"),
    "half of a part": lambda model: model.fc1.half(),
    "half of a module around it": lambda model: nn.Sequential(model).half(),
    "a new parameter": lambda model: setattr(model.fc1, "weight", nn.Parameter(torch.zeros(256, 64))),
    "registered anew": lambda model: model.fc2.register_parameter("bias", nn.Parameter(torch.zeros(64))),
}
ALLOWED: dict[str, Callable[[nn.Module], Any]] = {
    "to where it is": lambda model: model.to(device="cpu", dtype=torch.float32),
    "float": lambda model: model.float(),
    "cpu": lambda model: model.cpu(),
    "the same parameter": lambda model: setattr(model.fc1, "weight", model.fc1.weight),
    "to_empty": lambda model: _emptied(model),
}


def _emptied(model: nn.Module) -> None:
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        full(tensor)  # every parameter has memory
    model.load_state_dict(values)


class Run:
    """One case on one rank."""

    def __init__(self, case: Case) -> None:
        self.case, self.mesh = case, device_mesh_for(case.plan)

    def sharded(self, device: str = "cpu") -> nn.Module:
        with torch.device(device):
            model = make_model(self.case.family)
        return shard_module(model, self.mesh, self.case.plan)

    def gradients(self, model: nn.Module, *, is_sharded: bool = True) -> dict[str, torch.Tensor]:
        batch, passes = make_batch(self.case.family, 3), self.case.plan.micro_batches
        if is_sharded:
            batch = local_batch(batch, self.mesh, self.case.plan)
        for _ in range(passes):
            (loss_of(model(**batch)) / passes).backward()
        return {name: full(parameter.grad) for name, parameter in model.named_parameters()}

    def error(self, model: nn.Module, values: dict[str, torch.Tensor] | None = None) -> float:
        """Return the largest error of gradients, relative to the largest gradient; ``values`` are the parameters'."""
        reference = make_model(self.case.family)
        if values is not None:
            reference.load_state_dict(values)
        expected, found = self.gradients(reference, is_sharded=False), self.gradients(model)
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        return max((found[name] - gradient).abs().max().item() for name, gradient in expected.items()) / largest


def run_case(case: Case) -> dict[str, Any]:
    run = Run(case)
    result: dict[str, Any] = {}
    model = run.sharded()
    for name, call in REFUSED.items():
        result[name] = None
        try:
            call(model)
        except PlanMismatchError as error:
            result[name] = str(error)
    result["after refusals"] = run.error(model)
    for name, call in ALLOWED.items():
        model = run.sharded()
        run.gradients(model)
        model.zero_grad()
        call(model)
        result[name] = run.error(model)
    values = {name: tensor + 0.01 for name, tensor in make_model(case.family).state_dict().items()}
    for assign in (False, True):
        model = run.sharded()
        run.gradients(model)
        model.zero_grad()
        model.load_state_dict(values, assign=assign)
        result[f"whole tensors, assign={assign}"] = run.error(model, values)
    model = run.sharded("meta")
    try:
        model.load_state_dict(values)
    except PlanMismatchError as error:
        result["load on meta"] = str(error)
    model.to_empty(device="cpu")
    model.load_state_dict(values)
    result["from meta"] = run.error(model, values)
    model = run.sharded()
    del model.fc1.weight
    try:
        run.gradients(model)
    except PlanMismatchError as error:
        result["deleted"] = str(error)
    return result


def frozen_before(case: Case) -> list[str]:
    """Return what is wrong with gradients where some parameters are frozen before sharding, and trained later."""
    run = Run(case)
    model = make_model(case.family)
    first = {"fc2.bias", "head.bias"}
    for name in first:
        model.get_parameter(name).requires_grad_(False)
    shard_module(model, run.mesh, case.plan)
    reference = run.gradients(make_model(case.family), is_sharded=False)
    wrong = []
    for frozen in (first, {"fc2.bias"}, {"fc1.weight", "fc1.bias"}, set(), {"head.weight"}):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        model.zero_grad()
        batch, passes = local_batch(make_batch(case.family, 3), run.mesh, case.plan), case.plan.micro_batches
        for _ in range(passes):
            (loss_of(model(**batch)) / passes).backward()
        for name, parameter in model.named_parameters():
            if (parameter.grad is None) != (name in frozen):
                wrong.append(f"{name} with {sorted(frozen)} frozen")
            elif parameter.grad is not None and not torch.allclose(full(parameter.grad), reference[name], atol=1e-6):
                wrong.append(f"values of {name} with {sorted(frozen)} frozen")
    return wrong


def loaded_in_bf16(rank: int) -> float:
    """Return the largest difference from loaded values after a forward of a module that computes in bf16."""
    run = Run(fully_sharded("mlp", job=MIXED))
    model = run.sharded()
    values = {name: tensor + 0.01 for name, tensor in make_model("mlp").state_dict().items()}
    model.load_state_dict(values, assign=True)
    batch = make_batch("mlp")
    model(**local_batch({**batch, "x": batch["x"].to(torch.bfloat16)}, run.mesh, run.case.plan))
    return max((full(tensor) - values[name]).abs().max().item() for name, tensor in model.state_dict().items())


Result = tuple[dict[str, Any], list[str]]


def run(rank: int, names: list[str]) -> dict[str, Result]:
    return {name: (run_case(CASES[name]()), frozen_before(CASES[name]())) for name in names}


@functools.cache
def results_of(*, are_variants: bool) -> list[dict[str, Result]]:
    return run_on_gloo(run, 4, [name for name in CASES if (name in VARIANTS) == are_variants])


@pytest.fixture
def results(case: str) -> list[Result]:
    """What each rank has found."""
    return [by_case[case] for by_case in results_of(are_variants=case in VARIANTS)]


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_conversion_that_the_plan_does_not_allow_is_refused_at_once_on_every_rank(results: list, case: str) -> None:
    for found, _ in results:
        for name in REFUSED:
            assert found[name] is not None, name
            assert "before shard_module" in found[name]
        assert "float32 to torch.float16" in found["half"]
        assert found["after refusals"] <= TOLERANCE


@pytest.mark.parametrize("case", PARAMETERS)
def test_other_conversions_keep_gradients_reduced(results: list, case: str) -> None:
    found = results[0][0]
    assert {name: found[name] for name in ALLOWED if found[name] > TOLERANCE} == {}


@pytest.mark.parametrize("case", PARAMETERS)
def test_whole_tensors_are_loaded_with_and_without_assignment_and_from_meta(results: list, case: str) -> None:
    found = results[0][0]
    for name in ("whole tensors, assign=False", "whole tensors, assign=True", "from meta"):
        assert found[name] <= TOLERANCE, name
    assert 'to_empty(device="cpu")' in found["load on meta"]


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_removed_parameter_is_noticed_at_the_next_forward(results: list, case: str) -> None:
    assert "cannot be replaced or removed" in results[0][0]["deleted"]


@pytest.mark.parametrize("case", PARAMETERS)
def test_parameters_frozen_before_sharding_can_be_trained_later(results: list, case: str) -> None:
    assert results[0][1] == []


def test_loaded_parameters_stay_where_modules_see_others_in_bf16() -> None:
    assert run_on_gloo(loaded_in_bf16, 4) == [0.0] * 4
