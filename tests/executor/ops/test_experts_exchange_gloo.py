"""Plans that send tokens to the ranks of their experts run as planned, with the unsharded model's loss and gradient."""

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
GATE_UP = "model.layers.*.mlp.experts.gate_up_proj"


@dataclass(frozen=True)
class Case:
    """Pinned layouts of experts, the axis of the token exchange, and the planner that chooses the rest."""

    mesh: str
    ac: str
    used: tuple[str, ...]
    axis: str
    counts_nbytes: int
    planner: str


CASES = {
    "all ranks": Case("dp=4", "none", ("S(0)@dp",), "dp", 8 * 4 * 2, "ilp"),
    "all ranks, full AC": Case("dp=4", "full", ("S(0)@dp",), "dp", 8 * 4 * 2, "ilp"),
    "inner dim sharded too": Case("dp=2,tp=2", "selective", ("S(0)@dp", "SS(1,2)@tp"), "dp", 8 * 2 * 4, "random"),
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
    pins = [f"{GATE_UP}:used={used}" for used in case.used]
    session = PlanningSession(make_model(), cluster="1x4xtoy", example_inputs=make_batch(), pins=pins, **job)
    if case.planner == "ilp":
        return session.plan(mesh=case.mesh)
    plans = (session.plan(mesh=case.mesh, planner=f"random:{seed}") for seed in range(20))
    return next(plan for plan in plans if exchanges(plan, case))


def exchanges(plan: ShardingPlan, case: Case) -> dict[str, int]:
    """Return phase -> number of all-to-alls of token counts."""
    assert plan.estimate is not None
    key = ("all_to_all", case.axis, case.counts_nbytes)
    return {row.phase: row.count for row in plan.estimate.collectives if (row.kind, row.axis, row.bytes) == key}


@pytest.mark.parametrize("name", CASES)
def test_plans_exchange_tokens_as_planned(name: str, plans: dict[str, ShardingPlan]) -> None:
    recomputed = {} if CASES[name].ac == "none" else {"recompute": LAYERS}
    assert exchanges(plans[name], CASES[name]) == {"forward": LAYERS, **recomputed}
    assert verify(make_model(), plans[name], make_batch()).equal


def test_losses_and_gradients_equal_the_unsharded_models_with_token_exchange(
    plans: dict[str, ShardingPlan],
) -> None:
    assert run_on_gloo(train_all, 4, {name: plan.to_dict() for name, plan in plans.items()}) == [[]] * 4
