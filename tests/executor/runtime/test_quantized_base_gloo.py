"""Adapters on a quantized, frozen base: bytes as worked out by hand, as planned, equal to the unsharded module."""

from __future__ import annotations

import pytest
import torch
from support.gloo import run_on_gloo
from support.quantized_modules import BLOCK, EightBitLinear, FourBitLinear, QuantizedModel
from torch import nn

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner import PlanningSession, ShardingPlan
from planner.verification.verify_plan import verification_of

KINDS = {"4 bits": FourBitLinear, "8 bits": EightBitLinear}
PLANNERS = {"fsdp": "fsdp=4", "fsdp-tp": "fsdp=2,tp=2", "ilp": "x=2,y=2"}
IDS, LABELS = torch.randint(64, (2, 8, 12), generator=torch.Generator().manual_seed(1))


def module_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return QuantizedModel(KINDS[kind])


def session_of(kind: str, dtype: str = "fp32") -> PlanningSession:
    return PlanningSession(module_of(kind), cluster="1x4xtoy", example_inputs=(IDS, LABELS), dtype=dtype)


def planned(kind: str, planner: str, dtype: str = "fp32") -> ShardingPlan:
    return session_of(kind, dtype).plan(planner=planner, mesh=PLANNERS[planner])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_a_block_is_gathered_in_the_bytes_that_it_is_stored_in(kind: str, dtype: str, itemsize: int) -> None:
    plan = planned(kind, "fsdp", dtype)
    assert set(plan.fully_shard) == {"blocks.*"}
    width, hidden, rank = 32, 128, 4
    weights = 2 * width * hidden
    scales = weights // BLOCK if kind == "4 bits" else width + hidden
    adapters = 2 * rank * (width + hidden)
    block = weights // (2 if kind == "4 bits" else 1) + (scales + adapters) * itemsize
    gathers = {(row.phase, row.bytes): row.count for row in plan.estimate.collectives if row.kind == "all_gather"}
    assert gathers["forward", block] == gathers["backward", block] == 3
    trained, frozen = 3 * adapters, 2 * 64 * width * itemsize + 3 * (block - adapters * itemsize)
    assert plan.estimate.memory["parameters"] == pytest.approx((trained * 4 + frozen) / 4, rel=1e-3)
    assert plan.estimate.memory["optimizer_state"] == pytest.approx(trained * 8 / 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planner", PLANNERS)
def test_it_runs_as_planned(kind: str, planner: str) -> None:
    session = session_of(kind)
    plan = planned(kind, planner)
    assert verification_of(session.module, plan, session.inputs).outcome == "as-planned"


def run_steps(rank: int, kind: str) -> dict[str, float]:
    errors = {}
    for planner in PLANNERS:
        plan = planned(kind, planner)
        reference, model = module_of(kind), module_of(kind)
        mesh = device_mesh_for(plan)
        shard_module(model, mesh, plan)
        error = 0.0
        both = (reference, model)
        optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in both]
        for _ in range(3):
            expected, loss = reference(IDS, LABELS), model(*local_batch((IDS, LABELS), mesh, plan))
            expected.backward()
            loss.backward()
            error = max(error, abs(expected.item() - loss.full_tensor().item()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for own, sharded in zip(reference.parameters(), model.parameters(), strict=True):
            assert own.dtype == sharded.dtype
            error = max(error, (own - sharded.full_tensor()).abs().max().item())
        errors[planner] = error
    return errors


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_parameters_equal_the_unsharded_modules(kind: str) -> None:
    for errors in run_on_gloo(run_steps, 4, kind):
        assert max(errors.values()) <= 1e-5, errors
