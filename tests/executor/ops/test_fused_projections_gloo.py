"""Sharded models with fused projections have the loss and gradients of the unsharded model, on four real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support.gloo import run_on_gloo
from support.unsharded import differences
from torch import nn

from executor.verify import verify
from planner import PlanningSession, fuse_projections
from planner.plan.sharding_plan import ShardingPlan

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


def make_fused() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES)  # its q, k and v projections have biases
    return fuse_projections(transformers.AutoModelForCausalLM.from_config(config).train())


def make_batch() -> dict[str, Any]:
    ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def planned(mesh: str, **options: Any) -> ShardingPlan:
    planner = options.pop("planner", "ilp")
    session = PlanningSession(
        make_fused(),
        cluster="1x4xtoy",
        example_inputs=make_batch(),
        dtype="fp32",
        optimizer="sgd",
        micro_batches=1,
        **options,
    )
    return session.plan(mesh=mesh, planner=planner)


@pytest.fixture(scope="module")
def plans() -> dict[str, ShardingPlan]:
    columns = {
        "pins": [f"model.layers.*.{name}.weight:used=S(0)@tp" for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")],
        "data_axes": ["dp"],
    }
    return {
        "columns sharded": planned("dp=2,tp=2", ac="none", **columns),
        "columns sharded, fused ops": planned("dp=2,tp=2", ac="none", fused_ops=True, **columns),
        "one key head a rank, full AC": planned("dp=1,tp=4", ac="full", pins=columns["pins"], data_axes=[]),
        "selective": planned("dp=2,tp=2", ac="selective", fused_ops=True, **columns),
        "fully sharded": planned("dp=4", ac="none", planner="fully-sharded"),
        **{f"random {seed}": planned("dp=2,tp=2", ac="none", planner=f"random:{seed}") for seed in range(3)},
    }


def test_plans_shard_fused_projections(plans: dict[str, ShardingPlan]) -> None:
    for name, plan in plans.items():
        if not name.startswith(("random", "fully")):
            for layer in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
                assert str(plan.plan[f"model.layers.*.{layer}.weight"][-1]) == "S(0)", name


def run(rank: int, plans: dict[str, dict[str, Any]]) -> list[str]:
    return differences(plans, make_fused, make_batch)


def test_losses_and_gradients_equal_the_unsharded_models(plans: dict[str, ShardingPlan]) -> None:
    assert run_on_gloo(run, 4, {name: plan.to_dict() for name, plan in plans.items()}) == [[]] * 4


def test_plans_run_as_planned(plans: dict[str, ShardingPlan]) -> None:
    for name, plan in plans.items():
        report = verify(make_fused(), plan, make_batch())
        assert report.equal, (name, report)
