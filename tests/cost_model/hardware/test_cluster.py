"""Clusters and devices: accepted and rejected forms, and the round trip through JSON."""

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.hardware.cluster import ClusterError, ClusterSpec, LinkSpec, device_names, find_device

positive = st.floats(min_value=1e-9, max_value=1e15)


@pytest.mark.parametrize(
    ("text", "nodes", "devices_per_node", "device"),
    [
        ("4x8xh100-sxm-80gb", 4, 8, "h100-sxm-80gb"),
        ("8xh100-sxm-80gb", 1, 8, "h100-sxm-80gb"),
        ("2x2xTOY", 2, 2, "toy"),
        (" 1x4xA100-SXM-40GB ", 1, 4, "a100-sxm-40gb"),
    ],
)
def test_short_form(text: str, nodes: int, devices_per_node: int, device: str) -> None:
    cluster = ClusterSpec.parse(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (nodes, devices_per_node, device)
    assert cluster.size == nodes * devices_per_node
    assert cluster.name == f"{nodes}x{devices_per_node}x{device}"
    assert ClusterSpec.parse(cluster.name) == cluster


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("4x8xh100", ["unknown device 'h100'", "did you mean h100-sxm-80gb", "a100-sxm-40gb"]),
        ("8xh100-smx-80gb", ["did you mean h100-sxm-80gb"]),
        ("h100-sxm-80gb", ["write how many, as in 8xh100-sxm-80gb"]),
        ("8 gpus", ["cannot read cluster '8 gpus'", "4x8xh100-sxm-80gb", "toy"]),
        ("0x8xtoy", ["cluster.nodes is 0", "above 0"]),
        ("nowhere.yaml", ["cannot read cluster file nowhere.yaml", "exists"]),
        ("", ["cannot read cluster ''"]),
    ],
)
def test_rejected_text_says_what_is_wrong_and_what_to_do(text: str, parts: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.parse(text)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"device_per_node": 8}, "unknown key 'device_per_node'; did you mean devices_per_node"),
        ({"device": "h100"}, "unknown device 'h100'"),
        ({"device": 3}, "cluster.device must be a mapping"),
        ({"device": {"name": "mine", "kind": "cuda"}}, "missing memory_bytes"),
        ({"device": {"name": "toy", "memory": 1}}, "unknown key 'memory'; did you mean memory_bytes"),
        ({"device": {"name": "toy", "peak_flops": {"bf16": 1e9}}}, "peak_flops needs fp32"),
        ({"device": {"name": "toy", "kind": "tpu"}}, "kind is 'tpu'"),
        ({"device": {"name": "toy", "flash_attention": "yes"}}, "must be true or false"),
        ({"device": {"name": "toy", "gemm_efficiency": 1.5}}, "at most 1"),
        (
            {"inter_node": {"bandwidth_bytes_per_s": "fast"}},
            "cluster.inter_node.bandwidth_bytes_per_s must be a number",
        ),
        ({"inter_node": {"bandwidth_bytes_per_s": float("nan")}}, "must be a finite number"),
        ({"inter_node": {"bandwidth_bytes_per_s": 0}}, "must be above 0"),
        ({"inter_node": {"latency_s": -1}}, "cannot be negative"),
        ({"inter_node": {"efficiency": 1.1}}, "at most 1"),
        ({"inter_node": "rdma-300"}, "unknown link 'rdma-300'; did you mean rdma-"),
        ({"nodes": 1.5}, "cluster.nodes must be a whole number"),
        ({"nodes": True}, "cluster.nodes must be a number"),
        ({"cards_per_node": 0}, "cluster.cards_per_node is 0"),
        ({"oversubscription": 0.5}, "cluster.oversubscription is 0.5; 1 is none"),
        ({"reserved_gb": [1.0]}, "cluster.reserved_gb has 1 entries for 2 nodes; give one number, or one for each"),
        ({"reserved_gb": -1}, "cluster.reserved_gb is -1; give GB from 0"),
        ({"reserved_gb": 5000}, "cluster.reserved_gb is 5000; give GB from 0 up to a device's memory"),
        ({"rail_optimized": "yes"}, "cluster.rail_optimized must be true or false"),
        ({"sweeps": [3]}, "cluster.sweeps: an item must be a mapping"),
        ({"sweeps": [{"file": "a.txt", "ranks": 8}]}, "unknown key 'ranks'; did you mean ranks_per_node"),
        ({"intra_node": {"rank_shares": [2, 0.5]}}, "intra_node.rank_shares must be pairs"),
        ({"intra_node": {"rank_shares": [[4, 0.5], [2, 0.5]]}}, "rising ranks"),
        ({"intra_node": {"rank_shares": [[2, 1.5]]}}, "above 0 and at most 1"),
    ],
)
def test_rejected_mappings_name_the_place(change: dict[str, object], part: str) -> None:
    data: dict[str, object] = {"nodes": 2, "devices_per_node": 8, "device": "toy"}
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_dict({**data, **change})
    assert part in str(caught.value)


@pytest.mark.parametrize("missing", ["device", "devices_per_node"])
def test_missing_key_is_named(missing: str) -> None:
    data = {"devices_per_node": 8, "device": "toy"}
    del data[missing]
    with pytest.raises(ClusterError, match=f"missing {missing};"):
        ClusterSpec.from_dict(data)


def test_overrides_change_only_what_they_name() -> None:
    usual = ClusterSpec.parse("2x8xh100-sxm-80gb")
    cluster = ClusterSpec.parse(
        {
            "nodes": 2,
            "devices_per_node": 8,
            "device": {"name": "H100-SXM-80GB", "memory_bytes": 96e9},
            "inter_node": {"bandwidth_bytes_per_s": 12.5e9},
            "cards_per_node": 32,
        }
    )
    assert cluster.device == dataclasses.replace(
        usual.device, memory_bytes=96_000_000_000, source="h100-sxm-80gb with figures given by the user"
    )
    assert cluster.inter_node.bandwidth_bytes_per_s == 12.5e9
    assert cluster.inter_node.latency_s == usual.inter_node.latency_s
    assert (cluster.cards_per_node, cluster.intra_node) == (32, usual.intra_node)


def test_usual_cards_per_node() -> None:
    assert ClusterSpec.parse("2x8xh100-sxm-80gb").cards_per_node == 8
    assert ClusterSpec.parse("2x8xv100-sxm-32gb").cards_per_node == 4
    assert ClusterSpec.parse("2x2xl40s-48gb").cards_per_node == 1


def test_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("nodes: 2\ndevices_per_node: 4\ndevice: toy\nintra_node: nvlink4\ninter_node:\n  latency_s: 5e-6\n")
    cluster = ClusterSpec.parse(str(path))
    assert (cluster.size, cluster.inter_node.latency_s, cluster.intra_node.name) == (8, 5e-6, "nvlink4")
    path.write_text("nodes: [1")
    with pytest.raises(ClusterError, match=r"ours\.yaml is not YAML"):
        ClusterSpec.parse(path)
    path.write_text("- 1\n")
    with pytest.raises(ClusterError, match=r"ours\.yaml: the file must be a mapping"):
        ClusterSpec.parse(path)


def test_fabric_round_trips_and_is_left_out_where_usual() -> None:
    data = {"nodes": 2, "devices_per_node": 8, "device": "toy", "oversubscription": 2.0, "rail_optimized": False}
    cluster = ClusterSpec.from_dict(data)
    assert (cluster.oversubscription, cluster.rail_optimized) == (2.0, False)
    assert ClusterSpec.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert {"oversubscription", "rail_optimized", "sweeps"}.isdisjoint(ClusterSpec.parse("2x8xtoy").to_dict())


def test_the_node_with_the_most_reserved_memory_decides_for_all() -> None:
    data = {"nodes": 2, "devices_per_node": 8, "device": "h100-sxm-80gb"}
    cluster = ClusterSpec.from_dict({**data, "reserved_gb": [2.5, 10]})
    device_bytes = cluster.device.memory_bytes
    assert cluster.memory_bytes == device_bytes - 10_000_000_000
    assert ClusterSpec.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert ClusterSpec.from_dict({**data, "reserved_gb": 4}).memory_bytes == device_bytes - 4_000_000_000
    assert ClusterSpec.from_dict(data).memory_bytes == device_bytes


def test_uneven_wiring_by_hand() -> None:
    # DGX-1: of 6 links at 25e9 B/s, reached to nine tenths, a pair has one and all eight have six
    link = find_device("v100-sxm-32gb").intra_node
    assert link.rate_bytes_per_s(2) == pytest.approx(22.5e9, rel=0.01)
    assert link.rate_bytes_per_s(8) == pytest.approx(135e9)
    assert link.rate_bytes_per_s(6) == pytest.approx((link.rate_bytes_per_s(5) + link.rate_bytes_per_s(7)) / 2)
    assert link.rate_bytes_per_s(16) == link.rate_bytes_per_s(8)


@pytest.mark.parametrize("name", device_names())
def test_every_device_round_trips(name: str) -> None:
    cluster = ClusterSpec.parse(f"2x4x{name}")
    data = json.loads(json.dumps(cluster.to_dict(), sort_keys=True))
    again = ClusterSpec.from_dict(data)
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert pickle.loads(pickle.dumps(cluster)) == cluster  # noqa: S301 our own bytes: a cluster goes to worker processes


@given(
    nodes=st.integers(1, 4096),
    devices_per_node=st.integers(1, 72),
    cards=st.integers(1, 64),
    name=st.sampled_from(device_names()),
    bandwidth=positive,
    latency=st.floats(0, 1),
    efficiency=st.floats(1e-3, 1),
    rates=st.dictionaries(st.sampled_from(["bf16", "fp16", "fp8"]), positive),
)
def test_a_round_trip_preserves_every_figure(
    nodes: int,
    devices_per_node: int,
    cards: int,
    name: str,
    bandwidth: float,
    latency: float,
    efficiency: float,
    rates: dict[str, float],
) -> None:
    link = LinkSpec(
        name="ours", bandwidth_bytes_per_s=bandwidth, latency_s=latency, efficiency=efficiency, mesh_peers=3
    )
    device = dataclasses.replace(find_device(name), flop_rates=tuple(sorted({**rates, "fp32": 1.5}.items())))
    cluster = ClusterSpec(
        nodes=nodes,
        devices_per_node=devices_per_node,
        device=device,
        intra_node=device.intra_node,
        inter_node=link,
        cards_per_node=cards,
    )
    assert ClusterSpec.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_the_catalogue_is_complete_and_every_figure_has_a_source() -> None:
    promised = "a100-sxm-80gb h100-sxm-80gb h200-sxm-141gb b200-sxm-180gb mi300x-192gb l40s-48gb toy cpu"
    assert set(promised.split()) <= set(device_names())
    for name in device_names():
        device = find_device(name)
        for source in (device.source, device.intra_node.source, device.inter_node.source):
            assert source != "given by the user"
        assert 0 < device.peak_flops["fp32"] <= 2e14


def test_toy_communicates_far_faster_than_it_computes() -> None:
    toy = find_device("toy")
    reads_of_100k_parameters_s = 400_000 / toy.memory_bandwidth_bytes_per_s
    sends_of_100k_parameters_s = 400_000 / toy.intra_node.bandwidth_bytes_per_s + toy.intra_node.latency_s
    assert sends_of_100k_parameters_s < reads_of_100k_parameters_s / 50
    assert toy.memory_bytes < 100e6
