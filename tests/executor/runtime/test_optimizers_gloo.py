"""Each optimizer of torch on sharded parameters: equal to unsharded, or refused by name; on four real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.executor_cases import Case, data_parallel, fully_sharded, loss_of, make_batch, make_model, megatron
from support.fsdp_cases import CASES as FSDP_CASES
from support.gloo import run_on_gloo
from support.own_loops import TOLERANCE, full
from support.selected import selected
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from executor.torch_internals.dtensor import local_of
from planner.errors import RunError

optim = torch.optim
Make = Callable[[nn.Module], optim.Optimizer]


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


# A large eps where updates are otherwise signs of gradients: rounding of tiny gradients is not amplified.
RUN: dict[str, Make] = {
    "SGD": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, foreach": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "Adam": lambda m: optim.Adam(m.parameters(), lr=1e-2, eps=1e-3, amsgrad=True, maximize=True),
    "Adam, foreach": lambda m: optim.Adam(m.parameters(), lr=1e-2, eps=1e-3, foreach=True),
    "Adam, fused": lambda m: optim.Adam(m.parameters(), lr=1e-2, eps=1e-3, fused=True),
    "AdamW": lambda m: optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3),
    "AdamW, fused": lambda m: optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3, fused=True),
    "Adagrad": lambda m: optim.Adagrad(m.parameters(), lr=1e-2, eps=1e-3),
    "Adadelta": lambda m: optim.Adadelta(m.parameters(), eps=1e-3),
    "RMSprop": lambda m: optim.RMSprop(m.parameters(), lr=1e-3, eps=1e-2, centered=True, momentum=0.5),
    "NAdam": lambda m: optim.NAdam(m.parameters(), eps=1e-3),
    "RAdam": lambda m: optim.RAdam(m.parameters(), eps=1e-3),
    "Adamax": lambda m: optim.Adamax(m.parameters(), eps=1e-3),
    "ASGD": lambda m: optim.ASGD(m.parameters()),
    "LBFGS": lambda m: optim.LBFGS(m.parameters(), lr=0.1, max_iter=2),
    # The first trial step is so long that the curvature that the line search estimates is above the rounding of losses.
    "LBFGS, line search": lambda m: optim.LBFGS(m.parameters(), lr=10.0, max_iter=2, line_search_fn="strong_wolfe"),
}


class _AdamW8bit(optim.AdamW):
    """Stands for an optimizer of bitsandbytes, which is not installed here: its package tells it from torchao's."""

    __module__ = "bitsandbytes.optim.adamw"


REFUSED: dict[str, Make] = {
    "Adafactor": lambda m: optim.Adafactor(m.parameters()),
    "Adafactor, foreach": lambda m: optim.Adafactor(m.parameters(), foreach=True),
    "Adafactor of transformers": lambda m: transformers.Adafactor(m.parameters()),
    "Rprop": lambda m: optim.Rprop(m.parameters()),
    "Rprop, foreach": lambda m: optim.Rprop(m.parameters(), foreach=True),
    "SparseAdam": lambda m: optim.SparseAdam(m.parameters()),
    "SGD, fused": lambda m: optim.SGD(m.parameters(), fused=True),
    "Adagrad, fused": lambda m: optim.Adagrad(m.parameters(), fused=True),
    "8 bits of bitsandbytes": lambda m: _AdamW8bit(m.parameters()),
}
CASES: dict[str, Callable[[], Case]] = {
    "no groups": lambda: fully_sharded("mlp"),
    "for the step": FSDP_CASES["mlp, for the step, reduced on tp afterwards"],
}


def sharded(case: Case) -> tuple[nn.Module, Any]:
    mesh = device_mesh_for(case.plan)
    return shard_module(make_model(case.family), mesh, case.plan), mesh


def batches(case: Case, mesh: Any, seeds: int = 3) -> tuple[list[dict], list[dict]]:
    whole = [make_batch(case.family, seed) for seed in range(seeds)]
    return whole, [local_batch(batch, mesh, case.plan) for batch in whole]


def trained(model: nn.Module, optimizer: optim.Optimizer, given: list[dict]) -> None:
    """Train for as many steps as there are batches, with one backward pass in each call of the closure."""
    for batch in given:

        def closure(batch: dict = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(**batch))
            loss.backward()
            return loss

        if not isinstance(optimizer, optim.LBFGS):
            closure()
        optimizer.step(closure if isinstance(optimizer, optim.LBFGS) else None)


def error_of(case: Case, make: Make) -> float:
    """Return the largest difference from unsharded of parameters and optimizer states, relative to the largest."""
    reference = make_model(case.family)
    model, mesh = sharded(case)
    pairs = [(reference, make(reference)), (model, make(model))]
    for (one, optimizer), given in zip(pairs, batches(case, mesh), strict=True):
        trained(one, optimizer, given)
    kinds: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for expected, found in zip(reference.parameters(), model.parameters(), strict=True):
        kinds.setdefault("parameter", []).append((expected, found))
        states = [optimizer.state[p] for (_, optimizer), p in zip(pairs, (expected, found), strict=True)]
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            if isinstance(value, torch.Tensor):
                kinds.setdefault(key, []).append((value, states[1][key]))
    errors = [0.0]
    for tensors in kinds.values():
        largest = max(expected.abs().max().item() for expected, _ in tensors)
        errors += [(full(b) - a).abs().max().item() / max(largest, 1e-30) for a, b in tensors]
    return max(errors)


def refusal_of(case: Case, make: Make) -> str | None:
    model, mesh = sharded(case)
    optimizer = make(model)
    before = [full(parameter).clone() for parameter in model.parameters()]
    loss_of(model(**batches(case, mesh, 1)[1][0])).backward()
    try:
        optimizer.step()
    except RunError as error:
        assert all(torch.equal(full(p), b) for p, b in zip(model.parameters(), before, strict=True))
        return str(error)
    return None


def largest_difference(expected: nn.Module, found: nn.Module) -> float:
    pairs = zip(expected.parameters(), found.parameters(), strict=True)
    return max((full(b) - a).abs().max().item() for a, b in pairs)


def muon_error() -> float:
    """Return the largest difference of Muon's parameters, given the same gradients, which have full rank."""
    reference = make_model("mlp")
    model, mesh = sharded(fully_sharded("mlp"))
    optimizers = [optim.Muon(_matrices(one), lr=0.1) for one in (reference, model)]
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        for expected, found in zip(_matrices(reference), _matrices(model), strict=True):
            assert isinstance(found, DTensor)
            expected.grad = torch.randn(expected.shape, generator=generator)
            found.grad = distribute_tensor(expected.grad, mesh, found.placements, src_data_rank=None)
        for optimizer in optimizers:
            optimizer.step()
    return max(
        (full(b) - a).abs().max().item() for a, b in zip(reference.parameters(), model.parameters(), strict=True)
    )


def several_optimizers() -> float:
    """Return the largest difference of parameters with one optimizer for biases, and another one for weights."""
    case = FSDP_CASES["mlp, for the step, reduced on tp afterwards"]()
    reference = make_model("mlp")
    model, mesh = sharded(case)
    for one, given in zip((reference, model), batches(case, mesh, 5), strict=True):
        weights, biases = _matrices(one), [p for p in one.parameters() if p.ndim == 1]
        first, second = optim.SGD(weights, lr=0.1), optim.SGD([{"params": biases, "lr": 0.2}])
        for index, batch in enumerate(given):
            loss_of(one(**batch)).backward()
            first.step()
            first.zero_grad()
            if index % 2:  # gradients of biases accumulate over two steps of the other optimizer
                second.step()
                second.zero_grad()
    return max(
        (full(b) - a).abs().max().item() for a, b in zip(reference.parameters(), model.parameters(), strict=True)
    )


def scaled(case: Case, *, is_sharded: bool) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    """Return (loss scale, gradient norm) of each step, and parameters: the second step's last row is infinite."""
    model, mesh = sharded(case) if is_sharded else (make_model(case.family), device_mesh_for(case.plan))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    numbers = []
    for step in range(4):
        optimizer.zero_grad()
        for index in range(2):
            batch = make_batch(case.family, 10 * step + index)
            if step == 1:
                batch["x"][-1] = float("inf")
            batch = local_batch(batch, mesh, case.plan) if is_sharded else batch
            scaler.scale(loss_of(model(**batch)) / 2).backward()
        scaler.unscale_(optimizer)
        norm = full(nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item()
        scaler.step(optimizer)
        scaler.update()
        numbers.append((scaler.get_scale(), norm))
    return numbers, [full(parameter).detach() for parameter in model.parameters()]


def scale_after_infinity_on_one_rank(rank: int) -> tuple[float, bool]:
    """Return the loss scale after a step in which one rank's shard of a gradient is infinite, and if it was skipped."""
    case = megatron()
    model, mesh = sharded(case)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss_of(model(**batches(case, mesh, 1)[1][0]))).backward()
    weight = model.model.layers[0].mlp.up_proj.weight
    before = full(weight).clone()
    if rank == 3:
        local_of(weight.grad).view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), torch.equal(full(weight), before)


def amid_backward() -> str:
    """Return the error of an optimizer that steps in a hook on a gradient."""
    model, mesh = sharded(fully_sharded("mlp"))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    try:
        loss_of(model(**batches(fully_sharded("mlp"), mesh, 1)[1][0])).backward()
    except RunError as error:
        return str(error)
    return ""


def run_tables(rank: int, case: str, names: list[str]) -> dict[str, Any]:
    return {
        "errors": {name: error_of(CASES[case](), RUN[name]) for name in names if name in RUN},
        "refusals": {name: refusal_of(CASES[case](), REFUSED[name]) for name in names if name in REFUSED},
    }


def run(rank: int, names: list[str]) -> dict[str, Any]:
    scales = {
        name: [scaled(make(), is_sharded=is_sharded) for is_sharded in (False, True)] for name, make in CASES.items()
    }
    return {
        **run_tables(rank, "no groups", names),
        "replicated": {name: error_of(data_parallel("mlp"), REFUSED[name]) for name in ("Adafactor", "Rprop")},
        "muon": muon_error(),
        "several": several_optimizers(),
        "scales": scales,
        "one rank": scale_after_infinity_on_one_rank(rank),
        "amid backward": amid_backward(),
    }


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_on_gloo(run, 4, selected(request, "name"))


@pytest.mark.parametrize("name", RUN)
def test_parameters_and_states_equal_the_unsharded_ones(results: list, name: str) -> None:
    assert results[0]["errors"][name] <= TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_dtensor_does_not_run_is_refused_by_name(results: list, name: str) -> None:
    for by_rank in results:
        assert by_rank["refusals"][name] is not None
        assert name.split()[0].rstrip(",") in by_rank["refusals"][name]


@pytest.mark.slow
def test_optimizers_on_groups_that_reshard_after_the_step() -> None:
    for by_rank in run_on_gloo(run_tables, 4, "for the step", [*RUN, *REFUSED]):
        assert max(by_rank["errors"].values()) <= TOLERANCE
        assert None not in by_rank["refusals"].values()


def test_on_replicated_parameters_all_of_them_run(results: list) -> None:
    assert max(results[0]["replicated"].values()) <= TOLERANCE


def test_muon_orthogonalizes_whole_matrices(results: list) -> None:
    assert results[0]["muon"] == 0


def test_several_optimizers_may_step_at_different_times(results: list) -> None:
    assert results[0]["several"] <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_a_grad_scaler_skips_the_steps_that_the_unsharded_run_skips(results: list, case: str) -> None:
    (numbers, parameters), (found, found_parameters) = results[0]["scales"][case]
    assert [scale for scale, _ in found] == [scale for scale, _ in numbers] == [1024, 512, 512, 1024]
    norms = [norm for _, norm in numbers]
    assert [norm for _, norm in found] == pytest.approx(norms, rel=TOLERANCE, nan_ok=True)
    errors = [(b - a).abs().max().item() for a, b in zip(parameters, found_parameters, strict=True)]
    assert max(errors) <= TOLERANCE


def test_an_infinite_gradient_on_one_rank_is_seen_by_all(results: list) -> None:
    assert [by_rank["one rank"] for by_rank in results] == [(512.0, True)] * 4


def test_an_optimizer_that_steps_amid_a_backward_is_refused(results: list) -> None:
    for by_rank in results:
        assert "while a backward pass runs" in by_rank["amid backward"]
