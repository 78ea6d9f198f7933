"""Ranks that feed what the plan does not expect raise one error; samplers and loaders per rank train as unsharded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.executor_cases import FP32, S0, S1, R
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from executor.resolve.batch import data_shard, local_batch
from executor.runtime.whole_batches import whole_batches
from executor.shard import shard_module
from planner.errors import RanksError
from planner.plan.sharding_plan import PlanMesh, Port, ShardingPlan

SAMPLES, SEQ, WIDTH = 8, 4, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (self.fc2(self.fc1(x).tanh()) * scale - labels).square().mean()


def plan_of(*layout: Any, labels: Any = None) -> ShardingPlan:
    ports = {"x": Port(layout=layout), "labels": Port(layout=labels or layout)}
    return ShardingPlan(
        mesh=PlanMesh.parse("dp=2,tp=2"),
        plan={"*.*": (R, R)},
        input_plan={"input": ports},
        job=FP32,
    )


PLANS = {
    "samples": plan_of(S0, R),
    "samples on two axes": plan_of(S0, S0),
    "samples and sequences": plan_of(S0, S1),
    "sequences": plan_of(R, S1),
    "whole": plan_of(R, R),
    "labels finer": plan_of(S0, R, labels=(S0, S0)),
    "labels alone": plan_of(R, R, labels=(S0, R)),
    "labels on an outer axis too": plan_of(R, S0, labels=(S0, S0)),
}


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SAMPLES, SEQ, WIDTH, generator=generator) for name in ("x", "labels")}


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


@contextmanager
def warnings_of_shardplan() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardplan")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


Feed = Callable[[int, DeviceMesh, ShardingPlan], Any]


def different_global_batches(rank: int, mesh: DeviceMesh, plan: ShardingPlan) -> Any:
    batch = make_batch(seed=1 + (rank == 3))
    yield local_batch(batch, mesh, plan)


def a_sampler_per_process(rank: int, mesh: DeviceMesh, plan: ShardingPlan) -> Any:
    batch = make_batch(1)
    yield {name: tensor[2 * rank : 2 * rank + 2] for name, tensor in batch.items()}


def other_shapes(rank: int, mesh: DeviceMesh, plan: ShardingPlan) -> Any:
    yield {name: tensor[: 1 if rank == 1 else 2] for name, tensor in make_batch(1).items()}


def other_values(rank: int, mesh: DeviceMesh, plan: ShardingPlan) -> Any:
    batch = make_batch(1)
    yield local_batch(batch, mesh, plan) | {"scale": 2.0 if rank == 2 else 1.0}


def other_arguments(rank: int, mesh: DeviceMesh, plan: ShardingPlan) -> Any:
    batch = make_batch(1)
    yield local_batch(batch, mesh, plan) | ({} if rank else {"scale": 1.0})


def other_batches_later(rank: int, mesh: DeviceMesh, plan: ShardingPlan) -> Any:
    for step in range(8):
        batch = make_batch(step + 100 * (step > 5 and rank == 0))
        yield local_batch(batch, mesh, plan)


def equal_rows(rank: int, mesh: DeviceMesh, plan: ShardingPlan) -> Any:
    yield {name: tensor[:4] for name, tensor in make_batch(1).items()}


def right(rank: int, mesh: DeviceMesh, plan: ShardingPlan) -> Any:
    batch = make_batch(1)
    yield local_batch(batch, mesh, plan)
    batch["x"] = torch.ones(SAMPLES, SEQ, WIDTH)
    yield local_batch(batch, mesh, plan)


FEEDS: dict[str, tuple[str, Feed]] = {
    "different global batches": ("samples", different_global_batches),
    "different global batches, each rank with rows of its own": ("samples on two axes", different_global_batches),
    "a sampler per process": ("samples", a_sampler_per_process),
    "shapes": ("samples", other_shapes),
    "values": ("samples", other_values),
    "arguments": ("samples", other_arguments),
    "later": ("samples", other_batches_later),
    "equal rows": ("samples", equal_rows),
    "right": ("samples and sequences", right),
}


def fed(rank: int, mesh: DeviceMesh, name: str) -> tuple[int, str, list[str]]:
    """Return the number of calls, the error and the warnings of a loop."""
    plan_name, feed = FEEDS[name]
    plan = PLANS[plan_name]
    model = shard_module(make_model(), mesh, plan)
    calls = 0
    with warnings_of_shardplan() as messages:
        try:
            for batch in feed(rank, mesh, plan):
                model(**batch).backward()
                calls += 1
        except RanksError as error:
            return calls, str(error), messages
    return calls, "", messages


def whole_and_different(rank: int, mesh: DeviceMesh) -> str:
    model = shard_module(make_model(), mesh, PLANS["samples"])
    model.eval()
    with whole_batches(model):
        model(**make_batch(1))
        with pytest.raises(RanksError) as caught:
            model(**make_batch(1 + rank))
    return str(caught.value)


def sampled(rank: int, mesh: DeviceMesh, plan: ShardingPlan) -> tuple[tuple[int, int], float, float]:
    """Return the data shard, and the largest errors of loss and gradients of a loop with a sampler per rank."""
    whole = make_batch(5)
    dataset = TensorDataset(whole["x"], whole["labels"])
    shard, shards = data_shard(plan, mesh)
    sampler = DistributedSampler(dataset, num_replicas=shards, rank=shard, shuffle=False)
    loader = DataLoader(dataset, batch_size=4 // shards, sampler=sampler)
    model, reference = make_model(), make_model()
    shard_module(model, mesh, plan)
    loss_error = gradient_error = 0.0
    for step, (x, labels) in enumerate(loader):
        loss = model(**local_batch({"x": x, "labels": labels}, mesh, plan, is_local=True))
        rows = slice(4 * step, 4 * step + 4)
        expected = reference(whole["x"][rows], whole["labels"][rows])
        loss.backward()
        expected.backward()
        loss_error = max(loss_error, abs(loss.full_tensor().item() / expected.item() - 1))
        for name, parameter in model.named_parameters():
            wanted = reference.get_parameter(name).grad
            assert wanted is not None
            difference = (parameter.grad.full_tensor() - wanted).abs().max() / wanted.abs().max()
            gradient_error = max(gradient_error, difference.item())
        model.zero_grad()
        reference.zero_grad()
    return (shard, shards), loss_error, gradient_error


def run_all(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results: dict[str, Any] = {name: fed(rank, mesh, name) for name in FEEDS}
    results["whole"] = whole_and_different(rank, mesh)
    results["sampled"] = {name: sampled(rank, mesh, plan) for name, plan in PLANS.items()}
    results["shapes of local rows"] = [
        tuple(local_batch({"x": torch.zeros(3, SEQ, WIDTH)}, mesh, PLANS[name], is_local=True)["x"].shape)
        for name in ("samples", "samples on two axes", "samples and sequences", "sequences", "whole")
    ]
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_on_gloo(run_all, 4)


@pytest.mark.parametrize(
    ("name", "calls", "texts"),
    [
        (
            "different global batches",
            0,
            ["Rank 3 cut 'x' from another global batch than rank 0", "no DistributedSampler"],
        ),
        ("different global batches, each rank with rows of its own", 0, ["Rank 3 cut 'x' from another global batch"]),
        ("a sampler per process", 0, ["Rank 1 pass other values of 'x' than rank 0", "ranks 0, 1 the same ones"]),
        ("shapes", 0, ["'x' in different shapes", "(2, 4, 8) torch.float32 on ranks 0, 2, 3", "on rank 1"]),
        ("values", 0, ["different values of 'scale': 1.0 on ranks 0, 1, 3, 2.0 on rank 2"]),
        ("arguments", 0, ["different arguments", "x, labels on ranks 1, 2, 3"]),
        ("later", 7, ["Rank 0 cut 'x'"]),
    ],
)
def test_inputs_that_the_plan_does_not_expect_are_an_error_on_every_rank(
    results: list[dict[str, Any]], name: str, calls: int, texts: list[str]
) -> None:
    outcomes = [by_name[name] for by_name in results]
    assert [outcome[0] for outcome in outcomes] == [calls] * 4
    assert len({outcome[1] for outcome in outcomes}) == 1
    assert all(text in outcomes[0][1] for text in texts), outcomes[0][1]


def test_equal_rows_on_all_ranks_are_a_warning_of_one_rank(results: list[dict[str, Any]]) -> None:
    (calls, error, warnings), *others = (by_name["equal rows"] for by_name in results)
    assert (calls, error) == (1, "")
    assert len(warnings) == 1
    assert "same values of x, labels" in warnings[0]
    assert others == [(1, "", [])] * 3


def test_right_inputs_pass_without_a_word(results: list[dict[str, Any]]) -> None:
    assert [by_name["right"] for by_name in results] == [(2, "", [])] * 4


def test_whole_batches_that_differ_are_an_error(results: list[dict[str, Any]]) -> None:
    assert len({by_name["whole"] for by_name in results}) == 1
    assert "Ranks 1, 2, 3 pass another batch than rank 0" in results[0]["whole"]


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("samples", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("samples on two axes", [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ("samples and sequences", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("sequences", [(0, 1)] * 4),
        ("whole", [(0, 1)] * 4),
        ("labels finer", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("labels alone", [(0, 1)] * 4),
        ("labels on an outer axis too", [(0, 1)] * 4),
    ],
)
def test_a_sampler_per_rank_trains_as_unsharded(
    results: list[dict[str, Any]], name: str, shards: list[tuple[int, int]]
) -> None:
    outcomes = [by_name["sampled"][name] for by_name in results]
    assert [outcome[0] for outcome in outcomes] == shards
    assert max(outcome[1] for outcome in outcomes) <= 1e-5
    assert max(outcome[2] for outcome in outcomes) <= 1e-5


def test_sequences_are_cut_from_local_rows(results: list[dict[str, Any]]) -> None:
    halved = (3, SEQ // 2, WIDTH)
    whole = (3, SEQ, WIDTH)
    assert results[0]["shapes of local rows"] == [whole, whole, halved, halved, whole]
