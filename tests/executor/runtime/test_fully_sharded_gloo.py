"""FSDP groups in a training loop on four real processes: loss and gradients equal the unsharded module's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.executor_cases import (
    LLAMA_BLOCKS,
    S0,
    Case,
    R,
    loss_of,
    make_batch,
    make_model,
    megatron,
    replicated_on_tp,
    reshard_after_backward,
    reshard_after_step,
    with_fsdp_groups,
)
from support.fsdp_cases import CASES
from support.gloo import run_on_gloo
from support.selected import selected
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from executor.torch_internals.dtensor import allows_implicit_replication
from planner.plan.job import Job

STEPS = 2


@dataclass(frozen=True)
class Result:
    loss_error: float
    gradient_error: float
    """Largest difference, relative to the model's largest gradient."""
    norm_error: float
    """Relative error of the gradient norm that is clipped."""
    moved: tuple[str, ...]
    """Parameters that have another layout than the stored one, or whose gradient has."""
    flag_left_on: bool


def value(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_step(model: nn.Module, batches: list, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    total = 0.0
    for batch in batches:
        loss = loss_of(model(**batch)) / len(batches)
        loss.backward()
        total += value(loss).item()
    return total


def run_case(name: str) -> Result:
    case = CASES[name]()
    reference, model = make_model(case.family), make_model(case.family)
    stored = dict(case.plan.plan)
    mesh = device_mesh_for(case.plan)
    shard_module(model, mesh, case.plan)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (reference, model)]
    loss_error = gradient_error = norm_error = 0.0
    moved: list[str] = []
    for step in range(STEPS):
        batches = [make_batch(case.family, seed=10 * step + index) for index in range(case.plan.micro_batches)]
        expected = train_step(reference, batches, optimizers[0])
        loss = train_step(model, [local_batch(batch, mesh, case.plan) for batch in batches], optimizers[1])
        loss_error = max(loss_error, abs(loss - expected))
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        largest = max(gradient.abs().max().item() for gradient in gradients.values())
        for fqn, parameter in model.named_parameters():
            error = (value(parameter.grad) - gradients[fqn]).abs().max().item() / largest
            gradient_error = max(gradient_error, error)
            if not parameter.placements == parameter.grad.placements == stored[fqn]:
                moved.append(fqn)
        norms = [value(nn.utils.clip_grad_norm_(one.parameters(), 0.5)).item() for one in (reference, model)]
        norm_error = max(norm_error, abs(norms[1] / norms[0] - 1))
        for optimizer in optimizers:
            optimizer.step()
        # A forward without gradients between two steps.
        with torch.no_grad():
            loss_without_grad = loss_of(model(**local_batch(batches[0], mesh, case.plan)))
            loss_error = max(loss_error, abs(value(loss_without_grad).item() - loss_of(reference(**batches[0])).item()))
    return Result(
        loss_error=loss_error,
        gradient_error=gradient_error,
        norm_error=norm_error,
        moved=tuple(moved),
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
    assert results[name].norm_error <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_gradients_have_their_stored_layouts(results: dict[str, Result], name: str) -> None:
    assert results[name].moved == ()
    assert not results[name].flag_left_on


def run_in_bf16(rank: int) -> tuple[float, float, set[torch.dtype]]:
    case = with_fsdp_groups(megatron(job=Job(dtype="bf16", reduce_dtype="fp32")), LLAMA_BLOCKS)
    reference, model = make_model("llama").to(torch.bfloat16), make_model("llama")
    mesh = device_mesh_for(case.plan)
    shard_module(model, mesh, case.plan)
    batch = make_batch("llama")
    expected = loss_of(reference(**batch))
    expected.backward()
    loss = loss_of(model(**local_batch(batch, mesh, case.plan)))
    loss.backward()
    gradients = {name: parameter.grad.float() for name, parameter in reference.named_parameters()}
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    errors = [(value(p.grad) - gradients[name]).abs().max().item() for name, p in model.named_parameters()]
    dtypes = {parameter.dtype for parameter in model.parameters()} | {p.grad.dtype for p in model.parameters()}
    return abs(value(loss).item() - expected.item()), max(errors) / largest, dtypes


def test_parameters_are_stored_in_fp32_and_computed_in_bf16() -> None:
    for loss_error, gradient_error, dtypes in run_on_gloo(run_in_bf16, 4):
        # bf16 has 8 bits: sums in another order differ by about 2**-8.
        assert loss_error <= 1e-2
        assert gradient_error <= 2e-2
        assert dtypes == {torch.float32}


RESHARD_AFTER: dict[str, Callable[[Case], Case]] = {
    "forward": lambda case: case,
    "backward": reshard_after_backward,
    "step": reshard_after_step,
}


def run_state_dicts(rank: int, reshard_after: str) -> list[float]:
    case = RESHARD_AFTER[reshard_after](with_fsdp_groups(megatron(), LLAMA_BLOCKS))
    mesh = device_mesh_for(case.plan)
    batch = local_batch(make_batch("llama"), mesh, case.plan)
    trained, loaded, unsharded = make_model("llama"), make_model("llama"), make_model("llama")
    for model in (trained, loaded):
        shard_module(model, mesh, case.plan)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    loss_of(trained(**batch)).backward()
    optimizer.step()
    expected = value(loss_of(trained(**batch))).item()
    # Sharded, before a backward that has not run yet; then as full tensors, for an unsharded model.
    loaded.load_state_dict(trained.state_dict())
    losses = [value(loss_of(loaded(**batch))).item()]
    set_model_state_dict(loaded, get_model_state_dict(trained))
    losses.append(value(loss_of(loaded(**batch))).item())
    unsharded.load_state_dict({name: value(tensor) for name, tensor in trained.state_dict().items()})
    losses.append(loss_of(unsharded(**make_batch("llama"))).item())
    return [abs(loss - expected) for loss in losses]


@pytest.mark.parametrize("reshard_after", RESHARD_AFTER)
def test_state_dicts_have_the_stored_parameters(reshard_after: str) -> None:
    for errors in run_on_gloo(run_state_dicts, 4, reshard_after):
        assert max(errors) <= 1e-5


def run_after_forwards_without_backward(rank: int, reshard_after: str) -> list[float]:
    case = RESHARD_AFTER[reshard_after](with_fsdp_groups(megatron(), LLAMA_BLOCKS))
    mesh = device_mesh_for(case.plan)
    batch = local_batch(make_batch("llama"), mesh, case.plan)
    model = make_model("llama")
    shard_module(model, mesh, case.plan)
    parameters = dict(model.named_parameters())
    errors = []
    for trains in (False, True):
        with torch.set_grad_enabled(trains):
            model(**batch)  # without a backward
        if not trains:  # then parameters are sharded again
            errors += [float(dict(model.named_parameters())[name] is not own) for name, own in parameters.items()]
        with torch.no_grad():
            for own in parameters.values():
                own.mul_(0.9)
        unsharded = make_model("llama")
        unsharded.load_state_dict({name: value(tensor) for name, tensor in model.state_dict().items()})
        loss = value(loss_of(model(**batch))).item()
        errors.append(abs(loss - loss_of(unsharded(**make_batch("llama"))).item()))
    return errors


@pytest.mark.parametrize("reshard_after", ["backward", "step"])
def test_parameters_are_gathered_again_after_a_forward_without_backward(reshard_after: str) -> None:
    for errors in run_on_gloo(run_after_forwards_without_backward, 4, reshard_after):
        assert max(errors) <= 1e-5


def run_abandoned(rank: int) -> list[float]:
    """Abandon a step after two of its three micro-batches, change the parameters, and run a full step."""
    case = reshard_after_step(with_fsdp_groups(megatron(micro_batches=3), LLAMA_BLOCKS))
    mesh = device_mesh_for(case.plan)
    reference, model = make_model("llama"), make_model("llama")
    shard_module(model, mesh, case.plan)
    parameters = [
        list(one.parameters()) for one in (reference, model)
    ]  # as an optimizer has them: amid a step the model shows others
    global_batches = [make_batch("llama", seed) for seed in range(3)]
    batches = [local_batch(batch, mesh, case.plan) for batch in global_batches]
    errors = []
    for clears_between_forward_and_backward in (False, True):
        for batch in batches[:2]:
            loss_of(model(**batch)).backward()
        if not clears_between_forward_and_backward:
            model.zero_grad()
            with torch.no_grad():
                for parameter in itertools.chain(*parameters):
                    parameter.mul_(0.9)
        reference.zero_grad()
        for index in range(3):
            loss = loss_of(model(**batches[index])) / 3
            expected = loss_of(reference(**global_batches[index])) / 3
            if index == 0:
                model.zero_grad()
            loss.backward()
            expected.backward()
            errors.append(abs(value(loss).item() - expected.item()))
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        largest = max(gradient.abs().max().item() for gradient in gradients.values())
        for name, parameter in model.named_parameters():
            errors.append((value(parameter.grad) - gradients[name]).abs().max().item() / largest)
        model.zero_grad()
    return errors


def test_an_abandoned_step_leaves_nothing() -> None:
    for errors in run_on_gloo(run_abandoned, 4):
        assert max(errors) <= 1e-5


class Failing(nn.Module):
    """Fails in the forward or the backward, as its argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, fails: str = "") -> torch.Tensor:
        hidden = self.first(x)
        if fails == "forward":
            raise RuntimeError("on purpose")
        if fails == "backward":
            hidden.register_hook(_fail)
        return self.second(hidden).square().mean()


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("on purpose")


def failing_case() -> Case:
    plan = dataclasses.replace(
        replicated_on_tp("mlp").plan,
        plan={"*.weight": (S0, R)},
        compute_plan={"*.weight": (R, R)},
        gradient_plan={"*.weight": (S0, R)},
        fully_shard={"first": ("weight",), "second": ("weight",)},
        input_plan={"input": {"x": (S0, R)}},
    )
    return Case("mlp", plan)


def run_failures(rank: int, reshard_after: str) -> list[float]:
    torch.manual_seed(0)
    model, x = Failing(), torch.randn(8, 8)
    case = RESHARD_AFTER[reshard_after](failing_case())
    mesh = device_mesh_for(case.plan)
    model(x).backward()
    expected = model.first.weight.grad
    model.zero_grad()
    shard_module(model, mesh, case.plan)
    batch = local_batch({"x": x}, mesh, case.plan)
    errors = []
    for fails in ("forward", "backward"):
        try:
            model(**batch, fails=fails).backward()
        except RuntimeError:
            model.zero_grad()
        loss = model(**batch)
        loss.backward()
        errors.append((value(model.first.weight.grad) - expected).abs().max().item())
        model.zero_grad()
    return errors


@pytest.mark.parametrize("reshard_after", RESHARD_AFTER)
def test_a_failed_step_does_not_affect_the_next_one(reshard_after: str) -> None:
    for errors in run_on_gloo(run_failures, 4, reshard_after):
        assert max(errors) <= 1e-6
