"""Sharded models with fused projections have the loss and gradients of the unsharded model, on four real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support.gloo import run_on_gloo
from support.unsharded import differences
from torch import nn

from executor import local_batch, shard_module
from executor.resolve.mesh import device_mesh_for
from executor.verify import verify
from planner import PlanningSession, build_plan, fuse_projections, unfuse_state_dict
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


def make_plain() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES)  # its q, k and v projections have biases
    return transformers.AutoModelForCausalLM.from_config(config).train()


def make_fused() -> nn.Module:
    return fuse_projections(make_plain())


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


def largest_difference(rank: int, document: dict[str, Any]) -> float:
    """Return the largest difference of loss and gradients, under their old names, from the unsharded plain model's."""
    plan = ShardingPlan.from_dict(document)
    mesh = device_mesh_for(plan)
    reference, model = make_plain(), make_plain()
    shard_module(model, mesh, plan)
    expected, loss = reference(**make_batch()).loss, model(**local_batch(make_batch(), mesh, plan)).loss
    expected.backward()
    loss.backward()
    fused = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    gradients = unfuse_state_dict(model, fused)
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert gradients.keys() == wanted.keys()
    largest = max((gradients[name] - wanted[name]).abs().max().item() for name in wanted)
    return max(largest, abs(loss.full_tensor().item() - expected.item()))


def test_a_plan_with_the_technique_is_made_for_and_run_on_the_plain_model() -> None:
    options: dict[str, Any] = {"example_inputs": make_batch(), "dtype": "fp32", "optimizer": "sgd"}
    job = {"mesh": "dp=2,tp=2", "micro_batches": 1, "ac": "none", "techniques": ["fused-projections", "fused-ops"]}
    plan = build_plan(make_plain(), cluster="1x4xtoy", **options, **job)
    assert any("qkv_proj" in name for name in plan.plan)
    assert max(run_on_gloo(largest_difference, 4, plan.to_dict())) < 1e-5
