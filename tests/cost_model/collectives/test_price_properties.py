"""Collectives: properties of their times that hold on any cluster."""

import dataclasses
from itertools import pairwise, product
from typing import get_args

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.rank_groups import GIB, one_node

from cost_model.collectives.price import AxisGroup, CollectiveKind, collective_time_s, collective_times_s
from cost_model.hardware.cluster import ClusterSpec

KINDS = get_args(CollectiveKind)
DEVICES = [
    "a100-sxm-80gb",
    "h100-sxm-80gb",
    "b200-sxm-180gb",
    "mi300x-192gb",
    "mi250x-64gb",
    "l40s-48gb",
    "v100-sxm-32gb",
    "toy",
    "cpu",
]
kinds = st.sampled_from(KINDS)
clusters = st.sampled_from([ClusterSpec.parse(f"8x8x{device}") for device in DEVICES])
groups = st.sampled_from(
    [
        AxisGroup(nodes=nodes, ranks_per_node=ranks, groups_per_node=8 // ranks)
        for nodes in (1, 2, 4, 8)
        for ranks in (1, 2, 4, 8)
        if nodes * ranks > 1
    ]
)
sizes = st.integers(0, 1 << 36)


@given(kind=kinds, group=groups, cluster=clusters, nbytes=sizes, more=sizes)
def test_time_never_falls_as_bytes_grow(
    kind: CollectiveKind, group: AxisGroup, cluster: ClusterSpec, nbytes: int, more: int
) -> None:
    time_s = collective_time_s(kind, nbytes, group, cluster)
    assert collective_time_s(kind, nbytes + more, group, cluster) >= time_s
    assert (time_s > 0) == (nbytes > 0)


@given(
    kind=kinds,
    group=groups,
    cluster=clusters,
    nbytes=sizes,
    factor=st.floats(1, 1000),
    link=st.sampled_from(["intra_node", "inter_node"]),
    figure=st.sampled_from(["bandwidth_bytes_per_s", "latency_s", "efficiency"]),
)
def test_time_never_rises_with_a_faster_link(
    kind: CollectiveKind, group: AxisGroup, cluster: ClusterSpec, nbytes: int, factor: float, link: str, figure: str
) -> None:
    old = getattr(cluster, link)
    value = getattr(old, figure)
    better = {
        "latency_s": value / factor,
        "bandwidth_bytes_per_s": value * factor,
        "efficiency": min(1.0, value * factor),
    }
    faster = dataclasses.replace(cluster, **{link: dataclasses.replace(old, **{figure: better[figure]})})
    assert collective_time_s(kind, nbytes, group, faster) <= collective_time_s(kind, nbytes, group, cluster) * (
        1 + 1e-12
    )


@given(kind=kinds, group=groups, cluster=clusters, nbytes=sizes, cards=st.integers(1, 32), more=st.integers(0, 32))
def test_time_never_rises_with_more_cards(
    kind: CollectiveKind, group: AxisGroup, cluster: ClusterSpec, nbytes: int, cards: int, more: int
) -> None:
    few, many = (dataclasses.replace(cluster, cards_per_node=count) for count in (cards, cards + more))
    assert collective_time_s(kind, nbytes, group, many) <= collective_time_s(kind, nbytes, group, few) * (1 + 1e-12)


@given(
    kind=kinds,
    group=groups,
    cluster=clusters,
    nbytes=sizes,
    oversubscription=st.floats(1, 16),
    more=st.floats(0, 16),
    rails=st.booleans(),
)
def test_time_never_falls_with_more_oversubscription_nor_without_rails(
    kind: CollectiveKind,
    group: AxisGroup,
    cluster: ClusterSpec,
    nbytes: int,
    oversubscription: float,
    more: float,
    rails: bool,
) -> None:
    less = dataclasses.replace(cluster, oversubscription=oversubscription, rail_optimized=True)
    worse = dataclasses.replace(cluster, oversubscription=oversubscription + more, rail_optimized=rails)
    time_s = collective_time_s(kind, nbytes, group, less)
    assert collective_time_s(kind, nbytes, group, worse) >= time_s
    if group.nodes == 1:
        assert collective_time_s(kind, nbytes, group, worse) == time_s


@given(kind=kinds, cluster=clusters, nbytes=sizes)
def test_a_group_of_one_has_nobody_to_talk_to(kind: CollectiveKind, cluster: ClusterSpec, nbytes: int) -> None:
    assert collective_time_s(kind, nbytes, one_node(1), cluster) == 0.0


@given(kind=kinds, group=groups, cluster=clusters, nbytes=st.lists(sizes, min_size=1, max_size=8))
def test_array_equals_scalar(kind: CollectiveKind, group: AxisGroup, cluster: ClusterSpec, nbytes: list[int]) -> None:
    expected = [collective_time_s(kind, size, group, cluster) for size in nbytes]
    times = collective_times_s(kind, np.array(nbytes), group, cluster)
    assert times.dtype == np.float64
    np.testing.assert_allclose(times, expected, rtol=1e-15)


@given(group=groups, cluster=clusters, nbytes=sizes)
def test_all_reduce_costs_at_most_reduce_scatter_then_all_gather(
    group: AxisGroup, cluster: ClusterSpec, nbytes: int
) -> None:
    # PAT, which an all-reduce has not, undercuts it by up to 2 % around 2 MiB on 8 nodes
    parts = [collective_time_s(kind, nbytes, group, cluster) for kind in ("reduce_scatter", "all_gather")]
    assert collective_time_s("all_reduce", nbytes, group, cluster) <= sum(parts) * 1.02


def test_farther_groups_of_one_size_are_never_faster() -> None:
    cluster = ClusterSpec.parse("8x8xh100-sxm-80gb")
    for kind, nbytes in product(KINDS, (1 << 10, 1 << 16, 1 << 20, 1 << 24, GIB)):
        times = [
            collective_time_s(kind, nbytes, AxisGroup(nodes=n, ranks_per_node=8 // n, groups_per_node=n), cluster)
            for n in (1, 2, 4, 8)
        ]
        assert all(near <= far for near, far in pairwise(times)), (kind, times)
