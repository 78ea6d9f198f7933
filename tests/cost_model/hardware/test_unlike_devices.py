"""Clusters whose nodes have unlike devices: the least device, and what is wasted of the better ones."""

from __future__ import annotations

import dataclasses

import pytest

from cost_model.hardware.cluster import ClusterError, ClusterSpec, find_device

MIXED = "2x8xh100-sxm-80gb + 4x8xa100-sxm-80gb"


def test_the_slowest_device_stands_for_all() -> None:
    cluster, h100, a100 = ClusterSpec.parse(MIXED), find_device("h100-sxm-80gb"), find_device("a100-sxm-80gb")
    assert (cluster.nodes, cluster.devices_per_node, cluster.size, cluster.name) == (6, 8, 48, MIXED)
    least = cluster.device
    assert least.memory_bytes == min(h100.memory_bytes, a100.memory_bytes)
    assert least.peak_flops["bf16"] == a100.peak_flops["bf16"]
    assert "fp8" not in least.peak_flops, "an A100 has none"
    assert least.architecture == a100.architecture
    assert least.intra_node == a100.intra_node
    assert cluster.inter_node.bandwidth_bytes_per_s == min(
        h100.inter_node.bandwidth_bytes_per_s, a100.inter_node.bandwidth_bytes_per_s
    )


def test_memory_may_be_least_on_the_faster_device() -> None:
    cluster = ClusterSpec.parse("1x1xl40s-48gb + 1x1xa100-sxm-80gb")
    l40s, a100 = find_device("l40s-48gb"), find_device("a100-sxm-80gb")
    assert cluster.device.memory_bytes == l40s.memory_bytes
    assert cluster.device.memory_bandwidth_bytes_per_s == l40s.memory_bandwidth_bytes_per_s
    assert cluster.device.peak_flops["bf16"] == min(l40s.peak_flops["bf16"], a100.peak_flops["bf16"])


def test_waste_by_hand() -> None:
    (row,) = ClusterSpec.parse(MIXED).waste
    h100, a100 = find_device("h100-sxm-80gb"), find_device("a100-sxm-80gb")
    rates = [device.peak_flops["bf16"] * device.gemm_efficiency for device in (a100, h100)]
    assert (row.name, row.devices) == ("h100-sxm-80gb", 16)
    assert row.flops == pytest.approx(1 - rates[0] / rates[1])
    assert row.memory_bytes == h100.memory_bytes - min(h100.memory_bytes, a100.memory_bytes)
    assert ClusterSpec.parse("4x8xh100-sxm-80gb").waste == ()


def test_equal_parts_are_one_cluster() -> None:
    assert ClusterSpec.parse("2x8xh100-sxm-80gb + 2x8xH100-SXM-80GB") == ClusterSpec.parse("4x8xh100-sxm-80gb")


def test_round_trip_and_parts() -> None:
    cluster = ClusterSpec.parse(MIXED)
    assert ClusterSpec.from_dict(cluster.to_dict()) == cluster
    part = dataclasses.replace(cluster, nodes=3)
    assert (part.groups, part.waste, part.device) == ((), (), cluster.device)


def test_a_file_has_groups() -> None:
    groups = [{"nodes": 2, "device": "h100-sxm-80gb"}, {"nodes": 4, "device": "a100-sxm-80gb"}]
    read = ClusterSpec.from_dict({"devices_per_node": 8, "groups": groups, "oversubscription": 2})
    assert read == dataclasses.replace(ClusterSpec.parse(MIXED), oversubscription=2.0)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("2x8xh100-sxm-80gb + 4x4xa100-sxm-80gb", "the nodes have 4 and 8 devices"),
        ("2x8xh100-sxm-80gb + 1x8xmi300x-192gb", "no communicator spans cuda and rocm devices"),
        ("2x8xh100-sxm-80gb + ", "cannot read cluster ''"),
        ("2x8xh100-sxm-80gb + 4xnothing", "unknown device 'nothing'"),
    ],
)
def test_what_cannot_be_one_cluster(text: str, part: str) -> None:
    with pytest.raises(ClusterError, match=part):
        ClusterSpec.parse(text)


def test_groups_have_their_own_nodes() -> None:
    groups = [{"nodes": 2, "device": "h100-sxm-80gb"}]
    with pytest.raises(ClusterError, match="not the sum of its groups"):
        ClusterSpec.from_dict({"devices_per_node": 8, "nodes": 3, "groups": groups})
    with pytest.raises(ClusterError, match="has no device"):
        ClusterSpec.from_dict({"devices_per_node": 8, "groups": [{"nodes": 2}]})
