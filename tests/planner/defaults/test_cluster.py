"""The cluster of a job that names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cost_model import ClusterSpec
from cost_model.hardware.cluster import ClusterError
from cost_model.hardware.sweep import make_sweep
from planner.defaults import cluster as default
from planner.defaults import local_devices as devices
from planner.defaults.cluster import WITHOUT_GPU, cluster_file, cluster_of_program, default_cluster, with_ranks
from planner.defaults.local_devices import LocalDevices
from planner.defaults.ranks import Ranks, current_ranks
from planner.errors import JobError

H100S = LocalDevices(
    type="cuda", count=8, product="NVIDIA H100 80GB HBM3", memory_bytes=85_018_542_080, architecture="sm90"
)


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without GPU, whose user has no cluster, outside torchrun."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in (default.VARIABLE, "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


A100S = LocalDevices(
    type="cuda", count=8, product="NVIDIA A100-SXM4-80GB", memory_bytes=85_018_542_080, architecture="sm80"
)


def test_hosts_with_unlike_devices_are_one_cluster() -> None:
    found = cluster_of_program([H100S, H100S, A100S, A100S, H100S, H100S], ["a", "a", "b", "b", "c", "c"])
    assert found.cluster == ClusterSpec.parse("2x2xh100-sxm-80gb + 1x2xa100-sxm-80gb")
    assert found.why == "6 ranks on 3 nodes, NVIDIA A100-SXM4-80GB and NVIDIA H100 80GB HBM3"


def test_one_host_has_devices_of_one_type() -> None:
    with pytest.raises(ClusterError, match=r"ranks of a have different devices \(NVIDIA A100"):
        cluster_of_program([H100S, A100S], ["a", "a"])


def test_without_a_gpu_the_cluster_is_a_stated_one() -> None:
    found = default_cluster()
    assert found.cluster == ClusterSpec.parse(WITHOUT_GPU)
    assert "no GPU" in found.why
    assert default.VARIABLE in found.why


def test_the_gpus_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "local_devices", lambda: H100S)
    found = default_cluster()
    assert found.cluster == ClusterSpec.parse("1x8xh100-sxm-80gb")
    assert found.why == "8 ranks, NVIDIA H100 80GB HBM3"


def test_the_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = default_cluster()
    assert found.cluster == ClusterSpec.parse("4x4xcpu")
    assert "catalogue's device cpu" in found.why
    monkeypatch.setattr(default, "local_devices", lambda: H100S)
    assert default_cluster().cluster == ClusterSpec.parse("4x4xh100-sxm-80gb")


def test_ranks_whose_nodes_nobody_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert current_ranks() == Ranks(total=16, per_node=16)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert current_ranks() == Ranks(total=16, per_node=8)


def test_uneven_nodes_are_refused() -> None:
    with pytest.raises(JobError, match="6 ranks do not divide into nodes of 4"):
        Ranks(total=6, per_node=4)


def test_the_environment_comes_before_the_file_and_the_file_before_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "local_devices", lambda: H100S)
    cluster_file().parent.mkdir(parents=True)
    cluster_file().write_text("{nodes: 2, devices_per_node: 4, device: toy}")
    assert default_cluster().cluster == ClusterSpec.parse("2x4xtoy")
    assert default_cluster().why == str(cluster_file())
    monkeypatch.setenv(default.VARIABLE, "4x8xa100-sxm-80gb")
    assert default_cluster().cluster == ClusterSpec.parse("4x8xa100-sxm-80gb")
    assert default.VARIABLE in default_cluster().why


def test_a_wrong_cluster_in_the_environment_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(default.VARIABLE, "many")
    with pytest.raises(ClusterError, match=r"SHARDPLAN_CLUSTER: cannot read cluster 'many'"):
        default_cluster()


@pytest.mark.parametrize(("size", "name"), [(4, "1x4x"), (16, "2x8x"), (64, "8x8x")])
def test_a_mesh_says_how_many_devices_there_are(size: int, name: str) -> None:
    assert default_cluster(size=size).cluster == ClusterSpec.parse(f"{name}h100-sxm-80gb")


def test_a_mesh_that_fills_no_nodes_is_left_to_the_check_of_the_mesh() -> None:
    assert default_cluster(size=12).cluster.size == 8


def test_other_ranks_keep_links_cards_and_sweeps_that_fit() -> None:
    points = [(1e3, 1e-5), (1e6, 1e-3)]
    sweeps = (make_sweep("all_reduce", 1, 2, points), make_sweep("all_reduce", 1, 8, points))
    cluster = ClusterSpec.from_dict({"devices_per_node": 8, "device": "h100-sxm-80gb", "reserved_gb": 2.0})
    smaller = with_ranks(cluster.with_sweep(*sweeps), Ranks(total=4, per_node=2))
    assert smaller.name == "2x2xh100-sxm-80gb"
    assert smaller.cards_per_node == 2
    assert smaller.reserved_gb == (2.0, 2.0)
    assert [sweep.ranks_per_node for sweep in smaller.sweeps] == [2]
    assert ClusterSpec.from_dict(smaller.to_dict()) == smaller


def test_no_gpu_counts_where_the_process_group_is_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    assert devices.local_devices() == LocalDevices()
