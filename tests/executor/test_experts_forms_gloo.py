"""Experts in other forms than Mixtral's: plans train as the unsharded model, and weights keep their form on disk."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.gloo import GlooRanks
from support.small_models import EIGHT_HEADS
from support.trained_steps import Errors, errors_in_steps
from support.weight_cases import whole
from torch import nn

from executor import load_training_state, load_weights, save_training_state, save_weights
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from executor.verify import verify
from planner import build_plan
from planner.graph.trace_module import trace_module
from planner.model_rewrites.experts.experts_op import OP_NAME
from planner.plan.sharding_plan import ShardingPlan

pytestmark = pytest.mark.slow

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 16},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "nemotron_h": {"n_routed_experts": 4, "layers_block_type": ["moe", "attention"], "moe_latent_size": None},
    "lfm2_moe": {"num_experts": 4, "layer_types": ["full_attention"] * 2, "num_dense_layers": 1},
}
LR = 1e-3


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **EIGHT_HEADS | _EXPERTS | CONFIGS[name])
    ids = torch.randint(0, 256, (8, 32))
    return transformers.AutoModelForCausalLM.from_config(config).train(), {"input_ids": ids, "labels": ids}


def plan_of(name: str, mesh: str, planner: str, ac: str = "none") -> ShardingPlan:
    model, inputs = made(name)
    options: dict[str, Any] = {"cluster": "2x2xtoy", "mesh": mesh, "dtype": "fp32", "micro_batches": 1, "ac": ac}
    plan = build_plan(model, example_inputs=inputs, planner=planner, **options)
    assert verify(model, plan, inputs).equal, planner
    return plan


def errors(rank: int, name: str, plan: dict[str, Any]) -> Errors:
    return errors_in_steps(ShardingPlan.from_dict(plan), lambda: made(name), LR)


def moved(rank: int, name: str, folder: str, one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return what is wrong with weights that one plan loads and saves, and with its state as another loads it."""
    first, second = (ShardingPlan.from_dict(plan) for plan in (one, other))
    model, _ = made(name)
    expected = copy.deepcopy(model.state_dict())
    with torch.device("meta"):
        on_meta, _ = made(name)
    sharded = shard_module(on_meta, device_mesh_for(first), first)
    load_weights(sharded, Path(folder) / "pretrained")
    save_weights(sharded, Path(folder) / "saved")
    save_training_state(Path(folder) / "state", sharded)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    resumed = shard_module(model, device_mesh_for(second), second)
    load_training_state(Path(folder) / "state", resumed)
    read = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "saved").state_dict()
    found = {
        "loaded": {key: whole(tensor) for key, tensor in sharded.state_dict().items()},
        "saved": read,
        "resumed": {key: whole(tensor) for key, tensor in resumed.state_dict().items()},
    }
    return [
        f"{key} was not {how}"
        for how, state in found.items()
        for key, tensor in expected.items()
        if not torch.equal(state[key], tensor)
    ]


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(4) as started:
        yield started


@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_plans_train_as_unsharded(ranks: GlooRanks, name: str, mesh: str) -> None:
    for planner, ac in (("ilp", "none"), ("ilp", "selective"), *((f"random:{seed}", "none") for seed in range(4))):
        plan = plan_of(name, mesh, planner, ac)
        (found, *_) = ranks.call(errors, name, plan.to_dict())
        assert found.loss < 1e-5, (planner, ac)
        assert found.parameter < 1e-5, (planner, ac)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_keep_their_form(ranks: GlooRanks, name: str) -> None:
    model, _ = made(name)
    plans = [plan_of(name, "dp=2,tp=2", f"random:{seed}").to_dict() for seed in (0, 3)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder) / "pretrained")
        assert ranks.call(moved, name, folder, *plans) == [[]] * 4


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_one_op(name: str) -> None:
    graph = trace_module(made(name)[0], batch=8, seq=32).graph
    assert any(op.target_name == OP_NAME for op in graph.ops)
