"""Loss and gradients of sharded modules equal the unsharded ones', on four real processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.executor_cases import Case, data_parallel, fully_sharded, loss_of, make_batch, make_model, megatron
from support.gloo import run_on_gloo
from support.selected import selected
from torch import nn
from torch.distributed.tensor import DTensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from executor.torch_internals.dtensor import allows_implicit_replication

STEPS = 2

CASES: dict[str, Callable[[], Case]] = {
    "data-parallel mlp": lambda: data_parallel("mlp"),
    "data-parallel gpt2, tied": lambda: data_parallel("gpt2"),
    "data-parallel t5": lambda: data_parallel("t5"),
    "fully-sharded mlp": lambda: fully_sharded("mlp"),
    "fully-sharded llama": lambda: fully_sharded("llama"),
    "fully-sharded gpt2, tied": lambda: fully_sharded("gpt2"),
    "fully-sharded bert, tied": lambda: fully_sharded("bert"),
    "fully-sharded vit": lambda: fully_sharded("vit"),
    "megatron": megatron,
    "megatron, vocabulary sharded, FSDP": lambda: megatron(vocabulary=True, fsdp=True),
    "fully-sharded llama, full AC": lambda: fully_sharded("llama", activation_checkpointing={"model.layers.*": "full"}),
    "fully-sharded mlp, AC of an owner": lambda: fully_sharded("mlp", activation_checkpointing={"fc1": "full"}),
    "megatron, FSDP, selective AC": lambda: megatron(
        vocabulary=True, fsdp=True, activation_checkpointing={"model.layers.*": "selective"}
    ),
    "fully-sharded llama, 2 micro-batches": lambda: fully_sharded("llama", micro_batches=2),
}


@dataclass(frozen=True)
class Result:
    loss_error: float
    gradient_error: float
    """Largest difference, relative to the model's largest gradient."""
    moved: tuple[str, ...]
    """Parameters whose gradient has another layout."""
    tied: bool
    """Whether tied parameters are still tied."""
    flag_left_on: bool


def train_step(model: nn.Module, batches: list, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    total = 0.0
    for batch in batches:
        loss = loss_of(model(**batch)) / len(batches)
        loss.backward()
        total += (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
    return total


def run_case(name: str) -> Result:
    case = CASES[name]()
    reference, model = make_model(case.family), make_model(case.family)
    names = len(list(model.parameters()))
    mesh = device_mesh_for(case.plan)
    shard_module(model, mesh, case.plan)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (reference, model)]
    loss_error = gradient_error = 0.0
    for step in range(STEPS):
        # All micro-batches ignore equally many labels, so the mean of their means is the mean of all.
        batches = [make_batch(case.family, seed=10 * step + index) for index in range(case.plan.micro_batches)]
        expected = train_step(reference, batches, optimizers[0])
        loss = train_step(model, [local_batch(batch, mesh, case.plan) for batch in batches], optimizers[1])
        loss_error = max(loss_error, abs(loss - expected))
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        largest = max(gradient.abs().max().item() for gradient in gradients.values())
        for name, parameter in model.named_parameters():
            error = (parameter.grad.full_tensor() - gradients[name]).abs().max().item() / largest
            gradient_error = max(gradient_error, error)
        moved = tuple(name for name, p in model.named_parameters() if p.grad.placements != p.placements)
        for optimizer in optimizers:
            optimizer.step()
    return Result(
        loss_error=loss_error,
        gradient_error=gradient_error,
        moved=moved,
        tied=len(list(model.parameters())) == names,
        flag_left_on=allows_implicit_replication(),
    )


def run_cases(rank: int, names: list[str]) -> dict[str, Result]:
    return {name: run_case(name) for name in names}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Result]:
    return run_on_gloo(run_cases, 4, selected(request, "name"))[0]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_the_unsharded_modules(results: dict[str, Result], name: str) -> None:
    assert results[name].loss_error <= 1e-5
    assert results[name].gradient_error <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_gradients_have_their_parameters_layouts(results: dict[str, Result], name: str) -> None:
    assert results[name].moved == ()


@pytest.mark.parametrize("name", CASES)
def test_tied_parameters_stay_tied(results: dict[str, Result], name: str) -> None:
    assert results[name].tied


@pytest.mark.parametrize("name", CASES)
def test_implicit_replication_is_off_after_the_step(results: dict[str, Result], name: str) -> None:
    assert not results[name].flag_left_on
