"""Styles of transformers by name, and ``DistributedConfig``: layouts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from planner.errors import MeshError, PlanError, PlanTypeError, UnmatchedKeyError
from planner.imported.distributed_config import plan_from_distributed_config
from planner.imported.tp_plans import STYLES, plan_from_tp_plan
from planner.plan.ports import Port
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

R, S0, S1 = Replicate(), Shard(0), Shard(1)
MESH = PlanMesh.parse("dp=2,tp=2")


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=32
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def test_every_style_of_transformers_is_known() -> None:
    assert set(STYLES) == set(ALL_PARALLEL_STYLES.keys())


def test_the_plan_that_a_model_carries() -> None:
    plan = plan_from_tp_plan(llama(), MESH)
    assert plan.plan["model.layers.1.self_attn.q_proj.weight"] == (R, S0)
    assert plan.plan["model.layers.0.mlp.down_proj.weight"] == (R, S1)
    assert plan.input_plan["model.layers.0.mlp.down_proj.input"] == Port(layout=(S0, Shard(-1)))
    assert plan.output_plan["model.layers.0.mlp.down_proj"] == Port(layout=(S0, R))
    assert plan.input_plan["input"]["input_ids"] == Port(layout=(S0, R))
    assert plan.job.dtype == "fp32"
    assert ShardingPlan.from_dict(plan.to_dict()) == plan


def test_a_plan_of_ones_own_for_modules_and_parameters() -> None:
    styles = {"model.layers.*.mlp.up_proj": "packed_colwise", "model.layers.0.mlp.up_proj.weight": "rowwise"}
    plan = plan_from_tp_plan(llama(), PlanMesh.parse("tp=2,dp=2"), styles)
    assert plan.plan["model.layers.0.mlp.up_proj.weight"] == (S1, R)
    assert plan.plan["model.layers.1.mlp.up_proj.weight"] == (_StridedShard(0, split_factor=2), R)
    on_dp = plan_from_tp_plan(llama(), MESH, styles, axis="dp")
    assert on_dp.plan["model.layers.0.mlp.up_proj.weight"] == (S1, R)


@pytest.mark.parametrize(
    ("styles", "error", "message"),
    [
        ({"lm_head": "colwize"}, PlanTypeError, "style 'colwize' for 'lm_head'.*Write 'colwise'"),
        ({"lm_head": "by my own rule"}, PlanTypeError, "one of colwise"),
        ({"model.layer.*.mlp": "colwise"}, UnmatchedKeyError, "'model.layer.*.mlp'"),
    ],
)
def test_wrong_entries_name_style_and_key(styles: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_from_tp_plan(llama(), MESH, styles)


def test_a_model_without_a_plan_and_a_mesh_without_the_axis() -> None:
    with pytest.raises(PlanTypeError, match="Linear carries no tensor-parallel plan"):
        plan_from_tp_plan(nn.Linear(2, 2), MESH)
    with pytest.raises(UnmatchedKeyError, match="no axis 'cp'"):
        plan_from_tp_plan(llama(), MESH, axis="cp")


def test_a_config_gives_mesh_groups_and_styles() -> None:
    config = DistributedConfig(tp_size=2, fsdp_size=4, dp_replicate_size=3, fsdp_mixed_precision=True)
    plan = plan_from_distributed_config(llama(), config)
    plan.validate()
    assert str(plan.mesh) == "dp_replicate=3,fsdp=4,tp=2"
    name = "model.layers.0.mlp.up_proj.weight"
    assert (plan.plan[name], plan.compute_plan[name]) == ((R, S1, S0), (R, R, S0))
    assert plan.gradient_plan[name] == (Partial(), S1, S0)
    assert "mlp.up_proj.weight" in plan.fully_shard["model.layers.0"]
    assert plan.job.dtype == "bf16"


def test_rules_of_the_config_override_those_of_the_model() -> None:
    config = DistributedConfig(tp_size=2, tp_plan={"lm_head": "rowwise"})
    plan = plan_from_distributed_config(llama(), config)
    assert plan.plan["lm_head.weight"] == (S1,)
    assert plan.plan["model.layers.0.mlp.up_proj.weight"] == (S0,)
    assert plan_from_distributed_config(llama(), DistributedConfig(tp_size=2, tp_plan={})).plan == {}


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"tp_size": 2, "pp_size": 2}, ["pp_size is 2"]),
        ({"fsdp_size": 4, "ep_size": 4}, ["ep_size is 4 and tp_size 1"]),
        ({"tp_size": 2, "pp_size": 2, "fsdp_cpu_offload": True}, ["pp_size", "fsdp_cpu_offload"]),
    ],
)
def test_what_no_plan_can_say_is_one_error(fields: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_distributed_config(llama(), DistributedConfig(**fields))
    assert all(message in str(caught.value) for message in messages)


def test_sizes_of_one_need_no_plan() -> None:
    with pytest.raises(MeshError, match="sizes"):
        plan_from_distributed_config(llama(), DistributedConfig())
