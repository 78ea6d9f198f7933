"""Random ops of sharded modules: shards draw different numbers, replicas equal ones, and a recomputation the same."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.executor_cases import FP32, MESH, S0, R
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.tensor import DTensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.runtime.random_state import random_state, seed_random_ops, set_random_state
from executor.shard import shard_module
from planner.errors import PlanMismatchError
from planner.plan.sharding_plan import Port, ShardingPlan

SHAPE = (8, 2, 6, 4)
"""[batch, heads, sequence, width]."""

OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "dropout2d": lambda x: F.dropout2d(x, 0.5),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.1),
    "rrelu": lambda x: F.rrelu(-x.abs(), training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "masked attention": lambda x: F.scaled_dot_product_attention(
        x, x, x, attn_mask=torch.ones(6, 6).tril().bool(), dropout_p=0.5
    ),
    "generator": lambda x: torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(3)),
}
"""Name -> a random op; ranks that hold the same shard of its argument must agree, others must not."""

PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(5),
    "dropout of a plain tensor": lambda: F.dropout(torch.ones(64), 0.5),
    "randperm": lambda: torch.randperm(50),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 20),
    "Python": lambda: torch.tensor([random.random(), random.gauss(0, 1)]),
    "NumPy": lambda: torch.from_numpy(np.random.rand(3)),
}


class Noise(nn.Module):
    """Runs every op twice on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = x * self.scale
        sharded = {name: (op(x), op(x)) for name, op in OPS.items()}
        return sharded | {name: (op(), op()) for name, op in PLAIN.items()}


class Blocks(nn.Module):
    """Two blocks with dropout, perhaps checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def plan_of(model: nn.Module, layout: tuple[Any, ...] = (S0, R), **fields: Any) -> ShardingPlan:
    return ShardingPlan(
        mesh=MESH,
        job=FP32,
        plan={name: (R, R) for name, _ in model.named_parameters()},
        input_plan={"input": {"x": Port(layout=layout)}},
        **fields,
    )


def sharded(model: nn.Module, layout: tuple[Any, ...] = (S0, R), **fields: Any) -> Callable[[torch.Tensor], Any]:
    plan = plan_of(model, layout, **fields)
    mesh = device_mesh_for(plan)
    shard_module(model, mesh, plan)
    return lambda x: model(**local_batch({"x": x}, mesh, plan))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def drawn(layout: tuple[Any, ...]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    run = sharded(Noise(), layout)
    # The batch's shards are equal, so that results differ by their random numbers alone.
    x = torch.linspace(-1, 1, math.prod(SHAPE[1:])).view(1, *SHAPE[1:]).expand(SHAPE)
    return {name: (local(first), local(second)) for name, (first, second) in run(x).items()}


def losses(steps: int, **fields: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses of steps from seed 5 on, and the gradients of the last."""
    model = Blocks()
    run = sharded(model, **fields)
    seed_random_ops(model, 5)
    found = []
    for step in range(steps):
        model.zero_grad()
        loss = run(torch.randn(8, 16, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        found.append(local(loss.full_tensor()).item())
    return found, {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def resumed() -> list[float]:
    """Return losses of two steps, then of the third on another module that takes over the state."""
    batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    model = Blocks()
    run = sharded(model)
    seed_random_ops(model, 5)
    found = [run(batch).full_tensor().item() for batch in batches[:2]]
    later = Blocks()
    run = sharded(later)
    run(batches[0])
    set_random_state(later, random_state(model))
    return [*found, run(batches[2]).full_tensor().item()]


class DroppedLayers(nn.Module):
    """Layers that are skipped at random, by numbers of torch, Python and NumPy in turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draws: list[Callable[[], Any]] = [lambda: torch.rand([]), random.random, np.random.random]
        for index, layer in enumerate(self.layers):
            if draws[index % 3]() >= 0.4:
                x = layer(x)
        return x.square().mean()


def with_dropped_layers() -> list[tuple[float, list[bool]]]:
    """Return the loss of each of four steps, and which layers ran; parameters are stored in pieces."""
    model = DroppedLayers()
    weights = {name: (S0, R) for name, _ in model.named_parameters()}
    plan = dataclasses.replace(plan_of(model), plan=weights)
    mesh = device_mesh_for(plan)
    shard_module(model, mesh, plan)
    steps = []
    for step in range(4):
        model.zero_grad()
        batch = {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(step))}
        loss = model(**local_batch(batch, mesh, plan))
        loss.backward()
        ran = [layer.weight.grad is not None for layer in model.layers]
        steps.append((local(loss.full_tensor()).item(), ran))
    return steps


def states() -> Any:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def scenarios(rank: int) -> dict[str, Any]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)
    before = states()
    split, whole = drawn((S0, R)), drawn((R, R))
    untouched = states() == before
    checkpointed = {mode: losses(2, activation_checkpointing={"blocks.*": mode}) for mode in ("full", "selective")}
    return {
        "split": split,
        "whole": whole,
        "saved": losses(3),
        "again": losses(3),
        "two steps": losses(2),
        **checkpointed,
        "resumed": resumed(),
        "untouched": untouched,
        "dropped layers": with_dropped_layers(),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_on_gloo(scenarios, 4)


@pytest.mark.parametrize("name", OPS)
def test_shards_draw_different_numbers_and_replicas_equal_ones(results: list[dict[str, Any]], name: str) -> None:
    first = [result["split"][name][0] for result in results]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[2], first[3])
    assert not torch.equal(first[0], first[2])


@pytest.mark.parametrize("name", OPS)
def test_replicated_tensors_are_equal_on_all_ranks(results: list[dict[str, Any]], name: str) -> None:
    for first, second in [result["whole"][name] for result in results]:
        assert torch.equal(first, results[0]["whole"][name][0])
        assert torch.equal(second, results[0]["whole"][name][1])


@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors_are_equal_on_all_ranks(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        assert torch.equal(result["split"][name][0], results[0]["split"][name][0])


@pytest.mark.parametrize("name", [*(name for name in OPS if name != "generator"), *PLAIN])
def test_two_calls_draw_different_numbers(results: list[dict[str, Any]], name: str) -> None:
    first, second = results[0]["split"][name]
    assert not torch.equal(first, second)


def test_a_seed_repeats_a_run(results: list[dict[str, Any]]) -> None:
    assert results[0]["saved"][0] == results[0]["again"][0]
    assert len(set(results[0]["saved"][0])) == 3


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputed_block_draws_the_same_numbers(results: list[dict[str, Any]], mode: str) -> None:
    expected, gradients = results[0]["two steps"]
    found, recomputed = results[0][mode]
    assert found == pytest.approx(expected, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-6, atol=1e-7)


def test_a_run_resumes_from_the_random_state(results: list[dict[str, Any]]) -> None:
    assert results[0]["resumed"] == results[0]["saved"][0]


def test_the_callers_generator_is_left_alone(results: list[dict[str, Any]]) -> None:
    assert all(result["untouched"] for result in results)


def test_layers_that_are_dropped_at_random_are_dropped_on_all_ranks(results: list[dict[str, Any]]) -> None:
    steps = [result["dropped layers"] for result in results]
    assert all(each == steps[0] for each in steps)
    ran = torch.tensor([layers for _, layers in steps[0]])
    for draws in range(3):  # torch, Python and NumPy
        assert 0 < ran[:, draws::3].sum() < ran[:, draws::3].numel()


def test_an_unsharded_module_has_no_random_state() -> None:
    with pytest.raises(PlanMismatchError, match="no sharded module"):
        random_state(Blocks())
