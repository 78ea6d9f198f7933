"""Groups of ranks: the nodes of an axis, and its share of the network cards of a node."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.collectives.axis_groups import AxisGroup, axis_group, card_rate_bytes_per_s, pair_card_rate_bytes_per_s
from cost_model.hardware.cluster import ClusterError, ClusterSpec
from cost_model.layouts.layout import MeshSpec


def test_groups_share_the_cards_of_a_node() -> None:
    cluster = ClusterSpec.parse("4x8xh100-sxm-80gb")
    mesh = MeshSpec.parse("dp=4,tp=8")
    alone = AxisGroup(nodes=4, ranks_per_node=1, groups_per_node=1)
    beside_seven = axis_group(mesh, "dp", cluster)
    # 8 cards: a rank uses one whether its group is alone or not; all 8 ranks of a node together use 8
    assert card_rate_bytes_per_s(alone, cluster) == card_rate_bytes_per_s(beside_seven, cluster) == 48e9
    assert card_rate_bytes_per_s(AxisGroup(nodes=4, ranks_per_node=8, groups_per_node=1), cluster) == 8 * 48e9
    # 2 cards: 8 groups get a quarter each, one alone a whole one
    two_cards = dataclasses.replace(cluster, cards_per_node=2)
    assert card_rate_bytes_per_s(beside_seven, two_cards) == 12e9
    assert card_rate_bytes_per_s(alone, two_cards) == 48e9
    # 32 cards (AWS p5): 4 for each rank
    many = dataclasses.replace(cluster, cards_per_node=32)
    assert card_rate_bytes_per_s(beside_seven, many) == 4 * 48e9
    # one NVLink domain of 72: rings use the cards of 8 ranks, pairs all
    rack = ClusterSpec.parse("2x72xgb200-nvl72-186gb")
    whole = AxisGroup(nodes=2, ranks_per_node=72, groups_per_node=1)
    assert card_rate_bytes_per_s(whole, rack) == 8 * 48e9
    assert pair_card_rate_bytes_per_s(whole, rack) == 72 * 48e9


def test_oversubscribed_switches_slow_pairs_and_rings_without_rails() -> None:
    cluster = ClusterSpec.parse({"nodes": 4, "devices_per_node": 8, "device": "h100-sxm-80gb", "oversubscription": 3})
    group = AxisGroup(nodes=4, ranks_per_node=8, groups_per_node=1)
    assert card_rate_bytes_per_s(group, cluster) == 8 * 48e9
    assert pair_card_rate_bytes_per_s(group, cluster) == 8 * 16e9
    plain = dataclasses.replace(cluster, rail_optimized=False)
    assert card_rate_bytes_per_s(group, plain) == 8 * 16e9


@pytest.mark.parametrize(
    ("mesh", "axis", "expected"),
    [
        ("dp=4,tp=8", "tp", (1, 8, 1)),
        ("dp=4,tp=8", "dp", (4, 1, 8)),
        ("dp=8,tp=4", "dp", (4, 2, 4)),
        ("dp=8,tp=4", "tp", (1, 4, 2)),
        ("dp=2,tp=16", "tp", (2, 8, 1)),
        ("dp=2,tp=16", "dp", (2, 1, 8)),
        ("dp=2,cp=4,tp=4", "cp", (2, 2, 4)),
        ("dp=32,tp=1", "tp", (1, 1, 8)),
        ("tp=8", "tp", (1, 8, 1)),
    ],
)
def test_axis_group(mesh: str, axis: str, expected: tuple[int, int, int]) -> None:
    group = axis_group(MeshSpec.parse(mesh), axis, ClusterSpec.parse("4x8xtoy"))
    assert (group.nodes, group.ranks_per_node, group.groups_per_node) == expected


def test_axis_group_that_straddles_nodes_takes_the_worst() -> None:
    group = axis_group(MeshSpec.parse("dp=3,tp=4"), "tp", ClusterSpec.parse("2x6xtoy"))
    assert (group.nodes, group.ranks_per_node) == (2, 2)


@given(axes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4), devices=st.sampled_from([1, 2, 4, 8]))
def test_axis_group_accounts_for_every_rank(axes: list[int], devices: int) -> None:
    mesh = MeshSpec(axes=tuple((f"a{i}", size) for i, size in enumerate(axes)))
    cluster = ClusterSpec.parse(f"{max(1, mesh.size // devices)}x{devices}xtoy")
    ranks_on_node = min(mesh.size, devices)
    for name, size in mesh.axes:
        group = axis_group(mesh, name, cluster)
        assert group.size == size
        assert group.ranks_per_node * group.groups_per_node == ranks_on_node


def test_axis_group_rejects_meshes_that_do_not_fit() -> None:
    cluster = ClusterSpec.parse("4xtoy")
    with pytest.raises(ClusterError, match=r"mesh dp=8 has 8 devices, the cluster 1x4xtoy only 4"):
        axis_group(MeshSpec.parse("dp=8"), "dp", cluster)
    with pytest.raises(ClusterError, match=r"has no axis 'pp'; it has dp, tp"):
        axis_group(MeshSpec.parse("dp=2,tp=2"), "pp", cluster)
