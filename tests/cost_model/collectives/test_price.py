"""Collectives: numbers worked by hand, the chosen algorithm, and bad arguments."""

import numpy as np
import pytest
from support.rank_groups import GIB, one_node

from cost_model.collectives.price import (
    AxisGroup,
    axis_group,
    collective_lines,
    collective_time_s,
    collective_times_s,
    fastest_algorithm,
)
from cost_model.hardware.cluster import ClusterSpec
from cost_model.layouts.layout import MeshSpec


def test_ring_by_hand() -> None:
    # toy, 4 ranks: 1e-7 launch + 3 steps of (1e-7 s + S/4 at 1e11 B/s); an all-reduce does 6 steps
    toy = ClusterSpec.parse("4xtoy")
    assert collective_time_s("all_gather", 4_000_000, one_node(4), toy) == pytest.approx(1e-7 + 3 * (1e-7 + 1e6 / 1e11))
    assert collective_time_s("reduce_scatter", 4_000_000, one_node(4), toy) == pytest.approx(30.4e-6)
    ring = next(line for line in collective_lines("all_reduce", one_node(4), toy) if line.algorithm.startswith("ring"))
    assert ring.latency_s + 4e6 * ring.seconds_per_byte == pytest.approx(60.7e-6)
    assert collective_time_s("all_to_all", 4_000_000, one_node(4), toy) == pytest.approx(1e-7 + 3e-7 + 3e6 / 1e11)
    assert collective_time_s("send_recv", 1_000_000, one_node(4), toy) == pytest.approx(1e-7 + 1e-7 + 1e6 / 1e11)
    assert collective_time_s("broadcast", 1_000_000, one_node(4), toy) == pytest.approx(1e-7 + 3e-7 + 1e6 / 1e11)


def test_latencies_by_hand() -> None:
    # H100, 2 nodes of 8: 14 hops inside, 1 between (LL: 6.6 us + 0.6 and 2.7 a hop; Simple: 8.4 us + 3.4 and 14)
    cluster = ClusterSpec.parse("2x8xh100-sxm-80gb")
    group = AxisGroup(nodes=2, ranks_per_node=8, groups_per_node=1)
    lines = {line.algorithm: line for line in collective_lines("all_gather", group, cluster)}
    assert lines["ring LL"].latency_s == pytest.approx(17.7e-6)
    assert lines["ring LL128"].latency_s == pytest.approx(14e-6 + 14 * 1.9e-6 + 4.0e-6)
    assert lines["ring Simple"].latency_s == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 14e-6)
    # trees: up and down, 7 hops inside and log2(N) between; NVLSTree 25 us and 2 log2(N) hops of 20.9 us
    far = AxisGroup(nodes=64, ranks_per_node=8, groups_per_node=1)
    lines = {
        line.algorithm: line for line in collective_lines("all_reduce", far, ClusterSpec.parse("64x8xh100-sxm-80gb"))
    }
    assert lines["tree LL"].latency_s == pytest.approx(6.6e-6 + 2 * (7 * 0.6e-6 + 6 * 5e-6))
    assert lines["NVLSTree"].latency_s == pytest.approx(25e-6 + 12 * 20.9e-6)


def test_one_rank_per_node_has_pat() -> None:
    # 8.4 us + 2.8 us a rank + log2(16) hops of 14/3.5 us, three quarters of the card's 48e9 B/s
    cluster = ClusterSpec.parse("16x8xh100-sxm-80gb")
    group = AxisGroup(nodes=16, ranks_per_node=1, groups_per_node=8)
    line = next(line for line in collective_lines("all_gather", group, cluster) if line.algorithm == "PAT")
    assert line.latency_s == pytest.approx(8.4e-6 + 16 * 2.8e-6 + 4 * 4e-6)
    assert line.seconds_per_byte == pytest.approx(15 / 16 / (0.75 * 48e9))
    full = AxisGroup(nodes=16, ranks_per_node=8, groups_per_node=1)
    assert "PAT" not in {line.algorithm for line in collective_lines("all_gather", full, cluster)}


def test_trees_win_where_rings_are_long_and_rings_where_messages_are() -> None:
    cluster = ClusterSpec.parse("64x8xa100-sxm-80gb")
    group = AxisGroup(nodes=64, ranks_per_node=8, groups_per_node=1)
    assert fastest_algorithm("all_reduce", 1024, group, cluster) == "tree LL"
    assert fastest_algorithm("all_reduce", 64 * GIB, group, cluster) == "ring Simple"


def test_across_nodes_by_hand() -> None:
    # H100, 2 nodes of 8, one card of 48e9 B/s per rank
    cluster = ClusterSpec.parse("2x8xh100-sxm-80gb")
    group = AxisGroup(nodes=2, ranks_per_node=8, groups_per_node=1)
    lines = {line.algorithm: line for line in collective_lines("all_gather", group, cluster)}
    assert lines["ring LL"].seconds_per_byte == pytest.approx(15 / 16 / 39e9)  # the protocol's ceiling
    assert lines["ring Simple"].seconds_per_byte == pytest.approx(15 / 16 / 360e9)  # NVLink, not 8 cards of 48
    # all-to-all: half of each rank's buffer leaves the node, through its own card; NVIDIA's slides have 37 of 50 GB/s
    (pairs,) = collective_lines("all_to_all", group, cluster)
    assert pairs.latency_s == pytest.approx(6.6e-6 + 7 * 0.6e-6 + 8 * 2.7e-6)
    assert pairs.seconds_per_byte == pytest.approx(0.5 / 37.2e9, rel=0.01)
    # one message to the neighbour: through one card, or over NVLink
    assert collective_time_s("send_recv", 10**9, group, cluster) == pytest.approx(1e9 / 37.2e9, rel=0.02)
    assert collective_time_s("send_recv", 10**10, one_node(8), cluster) == pytest.approx(
        1e10 / (0.92 * 360e9), rel=0.03
    )


def test_reduction_in_the_switch_needs_enough_ranks() -> None:
    cluster = ClusterSpec.parse("8xh100-sxm-80gb")
    assert {line.algorithm for line in collective_lines("all_reduce", one_node(5), cluster)} >= {"nvls"}
    assert "nvls" not in {line.algorithm for line in collective_lines("all_reduce", one_node(4), cluster)}
    assert "nvls" not in {line.algorithm for line in collective_lines("all_gather", one_node(8), cluster)}


def test_strided_group_is_as_slow_as_its_one_card() -> None:
    cluster = ClusterSpec.parse("4x8xh100-sxm-80gb")
    strided = axis_group(MeshSpec.parse("dp=4,tp=8"), "dp", cluster)
    # ring over 4 nodes at 48e9 B/s: 3/4 of the bytes
    assert collective_time_s("all_gather", 8 * GIB, strided, cluster) == pytest.approx(6 * GIB / 48e9, rel=0.01)


def test_a_pair_in_a_full_mesh_has_one_of_seven_links() -> None:
    cluster = ClusterSpec.parse("8xmi300x-192gb")
    pair, all_eight = (collective_time_s("all_gather", 64 * GIB, one_node(n), cluster) for n in (2, 8))
    assert pair / (1 / 2) == pytest.approx(7 * all_eight / (7 / 8), rel=0.01)


def test_bad_arguments() -> None:
    cluster = ClusterSpec.parse("4xtoy")
    with pytest.raises(ValueError, match="unknown collective 'gossip'"):
        collective_time_s("gossip", 1, one_node(2), cluster)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give 0 or more"):
        collective_time_s("all_reduce", -1, one_node(2), cluster)
    with pytest.raises(ValueError, match="negative size"):
        collective_times_s("all_reduce", np.array([1, -1]), one_node(2), cluster)
    with pytest.raises(ValueError, match="count below 1"):
        AxisGroup(nodes=0, ranks_per_node=1, groups_per_node=1)
