"""Collectives: published nccl-tests and rccl-tests plateaus."""

import pytest
from support.rank_groups import GIB, one_node

from cost_model.collectives.price import AxisGroup, CollectiveKind, collective_time_s
from cost_model.hardware.cluster import ClusterSpec


@pytest.mark.parametrize(
    ("device", "ranks", "kind", "busbw_gb_s"),
    [
        # stas00/ml-engineering network/README.md @744d01e, 8 or 16 GiB, NCCL 2.27.7; NVIDIA/dgxc-benchmarking for H100
        ("h100-sxm-80gb", 8, "all_reduce", 479.9),
        ("h200-sxm-141gb", 8, "all_reduce", 482.3),
        ("h200-sxm-141gb", 7, "all_reduce", 460.0),
        ("h200-sxm-141gb", 6, "all_reduce", 435.6),
        ("h200-sxm-141gb", 5, "all_reduce", 414.2),
        ("h200-sxm-141gb", 4, "all_reduce", 363.3),
        ("h200-sxm-141gb", 8, "all_gather", 361.4),
        ("h200-sxm-141gb", 8, "reduce_scatter", 362.9),
        ("b200-sxm-180gb", 8, "all_reduce", 838.0),
        ("a100-sxm-80gb", 8, "all_reduce", 234.9),
    ],
)
def test_plateaus_inside_a_node_are_within_8_percent_of_nccl_tests(
    device: str, ranks: int, kind: CollectiveKind, busbw_gb_s: float
) -> None:
    cluster = ClusterSpec.parse(f"8x{device}")
    time_s = collective_time_s(kind, 8 * GIB, one_node(ranks), cluster)
    moved = 8 * GIB * (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
    assert moved / time_s / 1e9 == pytest.approx(busbw_gb_s, rel=0.08)


@pytest.mark.parametrize(
    ("cluster", "kind", "busbw_gb_s"),
    [
        # 8 or 16 GiB (p4de 2 GiB): awsome-distributed-training, oci-hpc-oke, stas00/ml-engineering @744d01e
        ({"nodes": 2, "device": "h100-sxm-80gb"}, "all_reduce", 487.1),
        ({"nodes": 2, "device": "h200-sxm-141gb"}, "all_reduce", 485.7),
        ({"nodes": 2, "device": "a100-sxm-40gb"}, "all_reduce", 189.6),
        ({"nodes": 4, "device": "h200-sxm-141gb"}, "all_reduce", 364.9),
        ({"nodes": 4, "device": "b200-sxm-180gb"}, "all_reduce", 381.8),
        ({"nodes": 2, "device": "h200-sxm-141gb"}, "all_gather", 325.5),
        (
            {
                "nodes": 2,
                "device": "a100-sxm-80gb",
                "inter_node": {"bandwidth_bytes_per_s": 12.5e9},
                "cards_per_node": 4,
            },
            "all_reduce",
            78.3,
        ),
    ],
)
def test_plateaus_across_nodes_are_within_12_percent_of_nccl_tests(
    cluster: dict[str, object], kind: CollectiveKind, busbw_gb_s: float
) -> None:
    spec = ClusterSpec.from_dict({"devices_per_node": 8, **cluster})
    time_s = collective_time_s(kind, 8 * GIB, AxisGroup(nodes=spec.nodes, ranks_per_node=8, groups_per_node=1), spec)
    moved = 8 * GIB * (2 if kind == "all_reduce" else 1) * (spec.size - 1) / spec.size
    assert moved / time_s / 1e9 == pytest.approx(busbw_gb_s, rel=0.12)


def test_one_pair_in_a_node_has_few_channels_until_its_message_is_large() -> None:
    # B200, nccl-tests sendrecv (Vultr): 38 to 85 GB/s up to 64 MiB, then hardly more time up to 512 MiB
    cluster = ClusterSpec.parse("8xb200-sxm-180gb")
    times = [collective_time_s("send_recv", size << 20, one_node(8), cluster) for size in (16, 64, 256, 512, 16384)]
    assert times == pytest.approx([213e-6, 793e-6, 810e-6, 859e-6, 25904e-6], rel=0.15)


@pytest.mark.parametrize(
    ("cluster", "nodes", "busbw_gb_s"),
    [
        # RCCL, 4 and 16 GiB: stas00/ml-engineering @744d01e, oci-hpc-oke @61d210a (chains, not rings, on two nodes)
        ("1x8xmi300x-192gb", 1, 312.9),
        ("2x8xmi300x-192gb", 2, 358.4),
        ("1x8xmi355x-288gb", 1, 406.8),
    ],
)
def test_full_meshes_are_within_8_percent_of_rccl_tests(cluster: str, nodes: int, busbw_gb_s: float) -> None:
    group = AxisGroup(nodes=nodes, ranks_per_node=8, groups_per_node=1)
    time_s = collective_time_s("all_reduce", 16 * GIB, group, ClusterSpec.parse(cluster))
    moved = 16 * GIB * 2 * (group.size - 1) / group.size
    assert moved / time_s / 1e9 == pytest.approx(busbw_gb_s, rel=0.08)
