"""Batches that are not the planned ones: masks, other lengths, padding; numbers equal the unsharded model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.executor_cases import make_model
from support.gloo import run_on_gloo
from torch.distributed.tensor import DTensor

from executor import device_mesh_for, local_batch, shard_module, whole_batches
from planner import PlanningSession
from planner.errors import PlanLayoutError
from planner.plan.sharding_plan import ShardingPlan

TOLERANCE = 1e-5
PLANS = (
    ("llama", "fsdp=4", "random:1"),  # splits sequences at the root
    ("llama", "fsdp=4", "random:2"),  # splits sequences inside, with FSDP groups
    ("llama", "dp=2,tp=2", "tensor-parallel"),
    ("mixtral", "fsdp=4", "random:1"),  # flattens samples and tokens
)
PAD = {"input_ids": 0, "labels": -100, "attention_mask": 0}


def batch_of(rows: int, length: int, *, masked: bool) -> dict[str, torch.Tensor]:
    """Return ids and labels; with a mask, the second row is padded on the right and the fourth on the left."""
    ids = torch.randint(1, 256, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    if masked:
        mask[1, -3:] = 0
        mask[3, :2] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    return {**batch, "attention_mask": mask} if masked else batch


CASES: dict[str, dict[str, Any]] = {
    "a mask that the plan does not name": {"rows": 8, "length": 16, "masked": True},
    "a length that no axis divides": {"rows": 8, "length": 13, "masked": False},
    "the same, padded": {"rows": 8, "length": 13, "masked": True, "pad": PAD},
    "samples that no axis divides, padded": {"rows": 6, "length": 16, "masked": True, "pad": PAD},
    "whole batches": {"rows": 6, "length": 13, "masked": True, "whole": True},
}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error_of(family: str, plan: ShardingPlan, case: dict[str, Any]) -> float | str:
    """Return the largest error of the loss and of the gradients, or the message of a refusal."""
    reference, model = make_model(family), make_model(family)
    mesh = device_mesh_for(plan)
    shard_module(model, mesh, plan)
    batch = batch_of(case["rows"], case["length"], masked=case["masked"])
    expected = reference(**batch).loss
    expected.backward()
    try:
        if case.get("whole"):
            with whole_batches(model):
                loss = model(**batch).loss
            assert not isinstance(loss, DTensor)
        else:
            loss = model(**local_batch(batch, mesh, plan, pad=case.get("pad"))).loss
    except PlanLayoutError as error:
        return str(error)
    loss.backward()
    largest = max(parameter.grad.abs().max().item() for parameter in reference.parameters())
    gradients = zip(model.parameters(), reference.parameters(), strict=True)
    differences = [(full(actual.grad) - other.grad).abs().max().item() / largest for actual, other in gradients]
    return max(abs(full(loss).item() - expected.item()), *differences)


def train(rank: int, documents: list[tuple[str, dict[str, Any]]]) -> list[dict[str, float | str]]:
    plans = [(family, ShardingPlan.from_dict(document)) for family, document in documents]
    return [{name: error_of(family, plan, case) for name, case in CASES.items()} for family, plan in plans]


@pytest.fixture(
    scope="module", params=[PLANS[:2], pytest.param(PLANS[2:], marks=pytest.mark.slow)], ids=["two", "more"]
)
def errors(request: pytest.FixtureRequest) -> list[tuple[Any, dict[str, float | str]]]:
    documents = []
    for family, mesh, planner in request.param:
        session = PlanningSession(make_model(family), cluster="1x4xtoy", batch=8, seq=16, dtype="fp32", micro_batches=1)
        documents.append((family, session.plan(planner=planner, mesh=mesh).to_dict()))
    return list(zip(request.param, run_on_gloo(train, 4, documents)[0], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_the_unsharded_models(errors: Any, case: str) -> None:
    for plan, found in errors:
        if case == "a length that no axis divides" and isinstance(found[case], str):
            # Tokens cannot be cut for the ranks: the error names the lengths that would do.
            assert "multiple of 4 along dim 1 (12 or 16, not 13), or pass pad=" in found[case], plan
        else:
            assert isinstance(found[case], float), (plan, found[case])
            assert found[case] < TOLERANCE, plan
    assert any(isinstance(found[case], float) for _, found in errors)
