"""What `build_plan` assumes where its caller says nothing: the cluster, the batch, the sequence length."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cost_model import ClusterSpec
from cost_model.hardware.reading import ClusterError
from planner import ShardingPlan, build_plan
from planner.defaults import cluster as default_clusters
from planner.defaults.cluster import cluster_of_ranks, default_cluster, with_ranks
from planner.defaults.job import ModelConfig, with_defaults
from planner.defaults.local_devices import LocalDevices
from planner.defaults.ranks import Ranks, current_ranks, ranks_on
from planner.errors import JobError, MeshError, ModelError

TINY = Path(__file__).parents[3] / "examples/tiny_llama.json"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the path of the user's cluster file, which does not exist; no environment says anything."""
    for name in ("SHARDPLAN_CLUSTER", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(default_clusters, "local_devices", LocalDevices)
    return default_clusters.cluster_file()


def tiny_llama() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig.from_json_file(TINY))


def test_build_plan_of_a_model_alone_plans_and_says_what_it_assumed(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = build_plan(tiny_llama())
    assert plan.cluster["device"]["name"] == "h100-sxm-80gb"
    assert (plan.mesh.size, plan.job.batch, plan.job.seq) == (8, 8, 64)
    assert [line.partition(":")[0] for line in plan.assumed] == ["cluster 1x8xh100-sxm-80gb", "batch 8", "seq 64"]
    assert capfd.readouterr().err.splitlines() == [f"shardplan: assumed {line}" for line in plan.assumed]
    plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json").assumed == plan.assumed


def test_an_own_module_is_planned_from_its_example_inputs_alone_inside_the_meta_device() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        plan = build_plan(module, example_inputs=(torch.zeros(16, 64),))
    assert plan.job.batch == 16
    assert len(plan.assumed) == 1
    assert plan.verification is not None
    assert plan.verification.outcome != "not-run"


def test_what_is_given_is_not_assumed() -> None:
    given = {"cluster": "1x4xtoy", "batch": 2, "seq": 16}
    assert with_defaults(given, ModelConfig(values={"max_position_embeddings": 64})) == (given, ())


@pytest.mark.parametrize(
    ("config", "seq", "why"),
    [
        ({"max_position_embeddings": 131_072}, 8192, "the model's context is 131,072"),
        ({"n_positions": 1024}, 1024, "the model's context"),
        ({"text_config": {"max_position_embeddings": 3000}}, 2048, "of 3,000, down to a power of two"),
        ({}, 2048, "no context length"),
    ],
)
def test_the_sequence_length_follows_from_the_context(config: dict[str, object], seq: int, why: str) -> None:
    options, assumed = with_defaults({"cluster": "1x4xtoy"}, ModelConfig(values=config))
    assert (options["batch"], options["seq"]) == (4, seq)
    assert why in assumed[-1]


def test_a_batch_of_micro_batches_has_a_sample_for_each() -> None:
    options, _ = with_defaults({"cluster": "1x4xtoy", "micro_batches": 3}, ModelConfig(values={}))
    assert options["batch"] == 12


def test_the_user_s_cluster_is_the_environment_s_then_the_file_s(
    monkeypatch: pytest.MonkeyPatch, nothing_given: Path
) -> None:
    nothing_given.parent.mkdir(parents=True, exist_ok=True)
    nothing_given.write_text("nodes: 2\ndevices_per_node: 4\ndevice: a100-sxm-80gb\n")
    assert default_cluster().cluster.name == "2x4xa100-sxm-80gb"
    assert default_cluster().why == str(nothing_given)
    monkeypatch.setenv("SHARDPLAN_CLUSTER", "1x2xtoy")
    assert default_cluster().cluster.name == "1x2xtoy"
    monkeypatch.setenv("SHARDPLAN_CLUSTER", "two of them")
    with pytest.raises(ClusterError, match="SHARDPLAN_CLUSTER: cannot read cluster"):
        default_cluster()


def test_the_cluster_of_ranks_has_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert current_ranks() == Ranks(total=8, per_node=4)
    assert default_cluster().cluster.name == "2x4xcpu"
    product = {"product": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_029_158_912, "architecture": "sm90"}
    found = LocalDevices(type="cuda", count=4, **product)
    monkeypatch.setattr(default_clusters, "local_devices", lambda: found)
    assert default_cluster().cluster.name == "2x4xh100-sxm-80gb"
    monkeypatch.delenv("WORLD_SIZE")
    assert default_cluster().cluster.name == "1x4xh100-sxm-80gb"
    assert "NVIDIA H100 80GB HBM3" in default_cluster().why


def test_a_user_s_cluster_keeps_its_links_for_other_numbers_of_ranks() -> None:
    user = ClusterSpec.parse("2x8xh100-sxm-80gb")
    found = with_ranks(user, Ranks(total=4, per_node=4))
    assert (found.name, found.cards_per_node) == ("1x4xh100-sxm-80gb", 4)
    assert found == cluster_of_ranks(user.device, Ranks(total=4, per_node=4))


def test_nodes_are_counted_by_the_names_of_their_hosts() -> None:
    assert ranks_on(["a", "a", "b", "b"]) == Ranks(total=4, per_node=2)
    with pytest.raises(JobError, match="different numbers of ranks: 2 on a, 1 on b"):
        ranks_on(["a", "a", "b"])


def test_a_mesh_of_another_size_gives_the_cluster_its_size() -> None:
    options, assumed = with_defaults({"mesh": "dp=2,tp=2"}, None)
    assert options["cluster"].name == "1x4xh100-sxm-80gb"
    assert "for the 4 devices of the mesh" in assumed[0]


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ModelError, match=r"not an nn\.Module"):
        build_plan("llama-3.1-8b")  # type: ignore[arg-type]


def test_a_mesh_that_contradicts_the_given_cluster_is_refused() -> None:
    with pytest.raises(MeshError):
        build_plan(tiny_llama(), cluster="1x8xtoy", mesh="dp=2,tp=2")
