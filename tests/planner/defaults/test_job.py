"""What `build_plan` assumes where its caller says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.executor_cases import make_batch, make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from api.requests.model_registry import load_model
from cost_model import ClusterSpec
from planner import build_plan
from planner.defaults.cluster import WITHOUT_GPU
from planner.defaults.job import ModelConfig, with_defaults
from planner.errors import MeshError, ModelError
from planner.plan.sharding_plan import ShardingPlan


@pytest.fixture(autouse=True)
def four_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDPLAN_CLUSTER", "1x4xtoy")


def assumed(config: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    given = None if config is None else ModelConfig(values=config)
    full, lines = with_defaults(options, given)
    assert len(lines) == len(full.keys() - options.keys())
    return {name: full[name] for name in full if name not in options}


def test_each_value_that_is_given_is_kept() -> None:
    assert assumed({"n_positions": 64}, cluster="1x2xtoy", batch=3, seq=5) == {}
    assert assumed(None, cluster="1x2xtoy") == {}


def test_one_sample_for_each_device_and_micro_batch() -> None:
    assert assumed({}, cluster="2x8xtoy", seq=64) == {"batch": 16}
    assert assumed({}, cluster="2x8xtoy", seq=64, micro_batches=4) == {"batch": 64}


@pytest.mark.parametrize(
    ("config", "seq"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 514}, 512),  # RoBERTa: two positions are for padding
        ({"max_position_embeddings": 131072}, 8192),
        ({"text_config": {"max_position_embeddings": 2048}, "vision_config": {"image_size": 336}}, 2048),
        ({"hidden_size": 8}, 2048),
        ({"max_position_embeddings": None, "n_positions": 256}, 256),
    ],
)
def test_the_sequences_are_as_long_as_models_are_trained(config: dict[str, Any], seq: int) -> None:
    full, lines = with_defaults({"cluster": "1x2xtoy", "batch": 2}, ModelConfig(values=config))
    assert full["seq"] == seq
    assert lines[0].startswith(f"seq {seq:,}: ")
    assert seq == config.get("max_position_embeddings") or "context" in lines[0]


def test_images_have_no_sequences() -> None:
    full, lines = with_defaults({"cluster": "1x2xtoy"}, ModelConfig(values={}, takes_seq=False))
    assert "seq" not in full
    assert lines == ("batch 2: one sample for each device",)


@pytest.mark.slow
def test_a_preset_is_planned_with_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDPLAN_CLUSTER")
    plan = build_plan(load_model("gpt2").module)
    assert (plan.job.batch, plan.job.seq) == (8, 1024)
    assert ClusterSpec.parse(plan.cluster) == ClusterSpec.parse(WITHOUT_GPU)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"


def test_a_hugging_face_model_is_planned_with_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    small = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    model = load_model({"hf_config": small}).module
    plan = build_plan(model)
    assert (plan.job.batch, plan.job.seq, plan.mesh.size) == (4, 1024, 4)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert [line.split(":")[0] for line in plan.assumed] == ["cluster 1x4xtoy", "batch 4", "seq 1,024"]
    printed = capsys.readouterr()
    assert printed.err.splitlines()[:3] == [f"shardplan: assumed {line}" for line in plan.assumed]
    assert printed.out == ""
    again = build_plan(model, cluster="1x4xtoy", batch=4, seq=1024)
    assert capsys.readouterr().err == ""
    assert again.assumed == ()
    assert (again.plan, again.input_plan, again.mesh) == (plan.plan, plan.input_plan, plan.mesh)


def test_an_own_module_is_planned_with_its_inputs_alone(tmp_path: Path) -> None:
    plan = build_plan(make_model("mlp"), example_inputs=make_batch("mlp"))
    assert [line.split(":")[0] for line in plan.assumed] == ["cluster 1x4xtoy"]
    plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == plan


def test_an_own_module_without_inputs_needs_them() -> None:
    with pytest.raises(ModelError, match="Give example_inputs"):
        build_plan(nn.Linear(4, 4))


def test_a_name_is_no_module() -> None:
    with pytest.raises(ModelError, match=r"is a str, not an nn\.Module.*load_model"):
        build_plan("gpt2")  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["context", "default"])
def test_a_plan_is_made_where_new_tensors_are_on_meta(how: str) -> None:
    model, inputs = make_model("mlp"), make_batch("mlp")
    expected = build_plan(model, example_inputs=inputs)
    if how == "context":
        with torch.device("meta"):
            plan = build_plan(model, example_inputs=inputs)
    else:
        torch.set_default_device("meta")
        try:
            plan = build_plan(model, example_inputs=inputs)
            assert torch.empty(1).is_meta
        finally:
            torch.set_default_device(None)
    assert (plan.plan, plan.mesh, plan.verification) == (expected.plan, expected.mesh, expected.verification)


def test_a_device_mesh_is_the_plan_s_mesh() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        plan = build_plan(make_model("mlp"), example_inputs=make_batch("mlp"), mesh=mesh, cluster="1x4xtoy")
        assert (plan.mesh.names, plan.mesh.shape) == (("rows", "columns"), (2, 2))
        with pytest.raises(MeshError, match="have no names"):
            build_plan(make_model("mlp"), example_inputs=make_batch("mlp"), mesh=init_device_mesh("cpu", (4,)))
    finally:
        dist.destroy_process_group()


def test_a_mesh_gives_the_number_of_devices() -> None:
    full, lines = with_defaults({"mesh": "dp=2,tp=4"}, None)
    assert full["cluster"].size == 8
    assert "for the 8 devices of the mesh" in lines[0]
