"""Adapters on a quantized, frozen base: bytes as worked out by hand, as planned, equal to the unsharded module."""

from __future__ import annotations

import pytest
import torch
from support.gloo import run_on_gloo
from support.quantized_modules import BLOCK, EightBitLinear, FourBitLinear, QuantizedModel
from support.trained_steps import Errors, errors_in_steps
from torch import nn

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


def errors(rank: int, kind: str) -> dict[str, Errors]:
    def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return module_of(kind), (IDS, LABELS)

    return {planner: errors_in_steps(planned(kind, planner), make) for planner in PLANNERS}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_parameters_equal_the_unsharded_modules(kind: str) -> None:
    for by_planner in run_on_gloo(errors, 4, kind):
        for planner, found in by_planner.items():
            assert max(found) <= 1e-5, planner
