"""Bags of embeddings on four processes: every mode and layout, with 10 rows that 4 ranks do not divide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from executor.shard import shard_module
from planner.errors import PlanLayoutError
from planner.plan.job import Job
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

ROWS, COLUMNS = 10, 8
R, S0, S1 = Replicate(), Shard(0), Shard(1)
TABLES = {"rows": (R, S0), "all rows": (S0, S0), "columns": (R, S1), "both": (S0, S1), "whole": (R, R)}
SQUARE = torch.tensor([[0, 1, 7, 3], [4, 9, 6, 6], [2, 2, 2, 5], [8, 0, 3, 3]])
FLAT = torch.tensor([5, 1, 1, 9, 3, 7, 0, 2, 3])
OFFSETS = torch.tensor([0, 3, 3, 5])
CALLS: dict[str, tuple[dict[str, Any], tuple[torch.Tensor, ...], bool]] = {
    "sum": ({"mode": "sum"}, (SQUARE,), False),
    "mean": ({"mode": "mean"}, (SQUARE,), False),
    "max": ({"mode": "max"}, (SQUARE,), False),
    "sum, padded": ({"mode": "sum", "padding_idx": 3}, (SQUARE,), False),
    "mean, padded": ({"mode": "mean", "padding_idx": -7}, (SQUARE,), False),
    "max, padded": ({"mode": "max", "padding_idx": 3}, (SQUARE,), False),
    "sum, flat": ({"mode": "sum"}, (FLAT, OFFSETS), False),
    "mean, flat, an empty bag": ({"mode": "mean"}, (FLAT, OFFSETS), False),
    "max, flat, an empty bag": ({"mode": "max"}, (FLAT, OFFSETS), False),
    "last offset": ({"mode": "mean", "include_last_offset": True}, (FLAT, torch.tensor([0, 3, 5, 9])), False),
    "weighted": ({"mode": "sum"}, (SQUARE,), True),
    "weighted, flat": ({"mode": "sum"}, (FLAT, OFFSETS), True),
}


def every_bag(rank: int) -> dict[tuple[str, str], str]:
    """Return (call, layout) -> the difference from the unsharded bag; an empty text where there is none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = {}
    for call, (options, arguments, weighted) in CALLS.items():
        for name, layout in TABLES.items():
            results[call, name] = _difference(mesh, options, arguments, weighted, {"weight": layout})
    results["refused", "max_norm"] = _refusal(mesh)
    results["split", "sum"] = _split_bags(mesh)
    return results


def _difference(
    mesh: DeviceMesh, options: dict[str, Any], arguments: tuple[torch.Tensor, ...], weighted: bool, layouts: Any
) -> str:
    torch.manual_seed(0)
    local = nn.EmbeddingBag(ROWS, COLUMNS, **options)
    plan = ShardingPlan(
        layouts,
        {"": (R, R)},
        [""],
        mesh=PlanMesh.parse("dp=2,tp=2"),
        job=Job(dtype="fp32"),
    )
    sharded = shard_module(copy.deepcopy(local), mesh, plan)
    bags = [local, sharded]
    weights = [torch.rand(arguments[0].shape).requires_grad_() if weighted else None]
    weights.append(None if weights[0] is None else weights[0].detach().clone().requires_grad_())
    outputs = [bag(*arguments, per_sample_weights=w) for bag, w in zip(bags, weights, strict=True)]
    try:
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
        seed = torch.linspace(-1, 1, outputs[0].numel()).reshape(outputs[0].shape)
        for output in outputs:
            (output * seed).sum().backward()
        assert sharded.weight.grad.placements == sharded.weight.placements
        torch.testing.assert_close(sharded.weight.grad.full_tensor(), local.weight.grad, rtol=1e-5, atol=1e-6)
        if weights[0] is not None:
            torch.testing.assert_close(weights[1].grad, weights[0].grad, rtol=1e-5, atol=1e-6)
    except AssertionError as error:
        return str(error)
    return ""


def _refusal(mesh: DeviceMesh) -> str:
    bag = nn.EmbeddingBag(ROWS, COLUMNS, max_norm=1.0)
    planned = PlanMesh.parse("dp=2,tp=2")
    shard_module(bag, mesh, ShardingPlan({"weight": (R, S0)}, mesh=planned, job=Job(dtype="fp32")))
    try:
        bag(SQUARE)
    except PlanLayoutError as error:
        return str(error)
    return "not refused"


def _split_bags(mesh: DeviceMesh) -> str:
    """The bags split over dp, the rows over tp."""
    torch.manual_seed(0)
    local = nn.EmbeddingBag(ROWS, COLUMNS, mode="sum")
    sharded = copy.deepcopy(local)
    plan = ShardingPlan(
        {"weight": (R, S0)},
        {"": (S0, R)},
        mesh=PlanMesh.parse("dp=2,tp=2"),
        input_plan={"input": (S0, R)},
        job=Job(dtype="fp32"),
    )
    shard_module(sharded, mesh, plan)
    output = sharded(SQUARE.chunk(2)[mesh.get_local_rank("dp")])
    expected = local(SQUARE)
    try:
        torch.testing.assert_close(output.full_tensor(), expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(sharded.weight.grad.full_tensor(), local.weight.grad)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def results() -> list[dict[tuple[str, str], str]]:
    return run_on_gloo(every_bag, 4)


@pytest.mark.parametrize("call", CALLS)
def test_bags_equal_the_unsharded_ones(call: str, results: list[dict[tuple[str, str], str]]) -> None:
    for rank in results:
        assert {name: rank[call, name] for name in TABLES} == dict.fromkeys(TABLES, "")


def test_bags_may_be_split_while_the_rows_are(results: list[dict[tuple[str, str], str]]) -> None:
    assert [rank["split", "sum"] for rank in results] == [""] * 4


def test_options_that_no_shard_can_run_are_refused(results: list[dict[tuple[str, str], str]]) -> None:
    assert "max_norm, sparse or scale_grad_by_freq" in results[0]["refused", "max_norm"]
