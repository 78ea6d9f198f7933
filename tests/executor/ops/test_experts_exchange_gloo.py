"""Tokens that go to the ranks of their experts: plans that do so run as they say, and give the unsharded numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from support.gloo import run_on_gloo
from support.unsharded import differences
from torch import nn

from executor.verify import verify
from planner import PlanningSession
from planner.plan.sharding_plan import ShardingPlan

ROWS, EXPERTS, LAYERS = 64, 8, 2
MATRICES = "model.layers.*.mlp.experts.gate_up_proj"


@dataclass(frozen=True)
class Case:
    """Where experts are pinned to be, and the axis on which tokens go to them; by what planner the rest is chosen."""

    mesh: str
    ac: str
    used: tuple[str, ...]
    axis: str
    counts_nbytes: int
    planner: str


CASES = {
    "all ranks": Case("dp=4", "none", ("S(0)@dp",), "dp", 8 * 4 * 2, "ilp"),
    "all ranks, again": Case("dp=4", "full", ("S(0)@dp",), "dp", 8 * 4 * 2, "ilp"),
    "each expert split": Case("dp=2,tp=2", "selective", ("S(0)@dp", "SS(1,2)@tp"), "dp", 8 * 2 * 4, "random"),
    "experts on both axes, tokens on the outer": Case(
        "a=2,b=2", "full", ("S(0)@a", "S(0)@b"), "a", 8 * 2 * 2, "random"
    ),
    "experts on both axes, tokens on the inner": Case(
        "a=2,b=2", "none", ("S(0)@a", "S(0)@b"), "b", 8 * 2 * 2, "random"
    ),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.MixtralConfig(
        **sizes,
        num_hidden_layers=LAYERS,
        vocab_size=256,
        max_position_embeddings=ROWS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
    )
    return transformers.MixtralForCausalLM(config).train()


def make_batch() -> dict[str, Any]:
    ids = torch.randint(0, 256, (8, ROWS), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, :50] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def train_all(rank: int, plans: dict[str, dict[str, Any]]) -> list[str]:
    return differences(plans, make_model, make_batch)


@pytest.fixture(scope="module")
def plans() -> dict[str, ShardingPlan]:
    return {name: plan_of(case) for name, case in CASES.items()}


def plan_of(case: Case) -> ShardingPlan:
    job = {"dtype": "fp32", "optimizer": "sgd", "micro_batches": 1, "ac": case.ac}
    pins = [f"{MATRICES}:used={used}" for used in case.used]
    session = PlanningSession(make_model(), cluster="1x4xtoy", example_inputs=make_batch(), pins=pins, **job)
    if case.planner == "ilp":
        return session.plan(mesh=case.mesh)
    found = (session.plan(mesh=case.mesh, planner=f"random:{seed}") for seed in range(20))
    return next(plan for plan in found if exchanges(plan, case))


def exchanges(plan: ShardingPlan, case: Case) -> dict[str, int]:
    """Return how often each phase tells experts' ranks how many tokens come."""
    assert plan.estimate is not None
    wanted = ("all_to_all", case.axis, case.counts_nbytes)
    return {row.phase: row.count for row in plan.estimate.collectives if (row.kind, row.axis, row.bytes) == wanted}


@pytest.mark.parametrize("name", CASES)
def test_plans_send_tokens_to_their_experts_as_they_say(name: str, plans: dict[str, ShardingPlan]) -> None:
    again = {} if CASES[name].ac == "none" else {"recompute": LAYERS}
    assert exchanges(plans[name], CASES[name]) == {"forward": LAYERS, **again}
    assert verify(make_model(), plans[name], make_batch()).equal


def test_models_that_send_tokens_to_their_experts_give_the_unsharded_models_numbers(
    plans: dict[str, ShardingPlan],
) -> None:
    assert run_on_gloo(train_all, 4, {name: plan.to_dict() for name, plan in plans.items()}) == [[]] * 4
