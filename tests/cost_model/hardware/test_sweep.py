"""Measured sweeps: accepted files, prices between and beyond the points, other shapes, and rejected files."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.collectives.price import AxisGroup, CollectiveKind, collective_time_s
from cost_model.collectives.sweep_prices import non_decreasing
from cost_model.hardware.cluster import ClusterError, ClusterSpec
from cost_model.hardware.sweep import Sweep, make_sweep, read_sweep, read_sweep_file

CLUSTER = ClusterSpec.parse("4x8xh100-sxm-80gb")
TWO_NODES = AxisGroup(nodes=2, ranks_per_node=8, groups_per_node=1)
ONE_NODE = AxisGroup(nodes=1, ranks_per_node=8, groups_per_node=1)
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)

NCCL_TESTS = """\
# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 1024 maxBytes 4194304 step: 4096(factor) warmup iters: 5 iters: 20 agg iters: 1
# Using devices
#  Rank  0 Group  0 Pid   1001 on     node-a device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1002 on     node-a device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   2001 on     node-b device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   2002 on     node-b device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float    none      -1     0.12    0.00    0.00      0     0.11    0.00    0.00      0
        1024            64     float    none      -1    29.48    0.03    0.03      0    28.34    0.04    0.03      0
     1048576         65536     float    none      -1    55.40   18.93   14.20      0    54.00   19.42   14.56      0
     4194304        262144     float    none      -1   177.0e0   54.10   40.58    N/A   77.10   54.40   40.80    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 18.2
"""


def swept(*points: tuple[float, float], kind: CollectiveKind = "all_gather", nodes: int = 2) -> ClusterSpec:
    return CLUSTER.with_sweep(make_sweep(kind, nodes, 8, points))


def test_nccl_tests_output_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sweep.txt"
    path.write_text(NCCL_TESTS)
    (sweep,) = read_sweep_file(path)
    assert (sweep.kind, sweep.nodes, sweep.ranks_per_node) == ("all_gather", 2, 2)
    assert sweep.nbytes == (1024, 1048576, 4194304)
    assert sweep.times_s == pytest.approx((29.48e-6, 55.40e-6, 177e-6))


def test_nccl_tests_output_of_all_reduce_with_its_older_header(tmp_path: Path) -> None:
    lines = (
        "    33554432       8388608     float     sum    203.1  165.21  289.12  1e-06   202.8  165.45  289.54  1e-06\n"
    )
    path = tmp_path / "all_reduce_8.out"
    path.write_text("# nThread 1 nGpus 8 minBytes 1024\n" + lines)
    (sweep,) = read_sweep_file(path, nodes=1, ranks_per_node=8)
    assert (sweep.kind, sweep.nbytes, sweep.times_s) == ("all_reduce", (33554432,), pytest.approx((203.1e-6,)))
    with pytest.raises(ClusterError, match="does not state nodes, ranks_per_node; give it next to the file's name"):
        read_sweep_file(path)


def test_csv_and_json_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ours.csv"
    path.write_text(
        "kind,nodes,ranks_per_node,nbytes,time_s\n"
        "all_reduce,1,8,1024,2e-5\nall_to_all,2,8,4096,4e-5\nall_reduce,1,8,4096,3e-5\n"
    )
    reduce, exchange = read_sweep_file(path)
    assert (reduce.nbytes, reduce.times_s) == ((1024, 4096), (2e-5, 3e-5))
    assert (exchange.kind, exchange.nodes) == ("all_to_all", 2)
    again = tmp_path / "ours.json"
    again.write_text(json.dumps([reduce.to_dict(), exchange.to_dict()]))
    assert read_sweep_file(again) == (reduce, exchange)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.csv", "kind,nodes,nbytes,time_s\nall_reduce,1,8,1e-5\n", "line 2: no ranks_per_node"),
        ("a.csv", "kind,nodes,ranks_per_node,nbytes,time_s\ngossip,1,8,8,1e-5\n", "unknown collective 'gossip'"),
        ("a.csv", "kind,nodes,ranks_per_node,nbytes,time_s\nall_reduce,1,8,8,-1\n", "must be above 0"),
        ("a.json", "[1", "not JSON"),
        ("a.json", '[{"kind": "all_reduce"}]', "missing nodes, ranks_per_node, nbytes, times_s"),
        (
            "a.json",
            '[{"kind": "all_reduce", "nodes": 1, "ranks_per_node": 1, "nbytes": [1], "times_s": [1]}]',
            "1 x 1 ranks",
        ),
        ("all_reduce_2x8.txt", "# nothing measured\n", "does not state nodes, ranks_per_node"),
    ],
)
def test_rejected_files_say_what_is_wrong_and_where(tmp_path: Path, name: str, text: str, part: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        read_sweep_file(path)
    assert part in str(caught.value)
    assert name in str(caught.value)


def test_invalid_sweeps_are_rejected() -> None:
    with pytest.raises(ClusterError, match="sizes must increase"):
        Sweep(kind="all_reduce", nodes=1, ranks_per_node=2, nbytes=(2.0, 1.0), times_s=(1.0, 1.0))
    with pytest.raises(ClusterError, match="2 sizes and 1 times"):
        Sweep(kind="all_reduce", nodes=1, ranks_per_node=2, nbytes=(1.0, 2.0), times_s=(1.0,))
    with pytest.raises(ClusterError, match="16 ranks per node, the cluster 4x8xh100-sxm-80gb has 8"):
        CLUSTER.with_sweep(make_sweep("all_reduce", 1, 16, [(1.0, 1.0)]))
    with pytest.raises(ClusterError, match=r"cannot read sweep .*nowhere"):
        CLUSTER.with_sweep("nowhere.txt")


def test_a_cluster_file_names_its_sweeps(tmp_path: Path) -> None:
    (tmp_path / "gather.txt").write_text(NCCL_TESTS)
    (tmp_path / "plain.txt").write_text("  1024  256  float  sum  -1  20.0  0.05  0.09  0  20.0  0.05  0.09  0\n")
    path = tmp_path / "ours.yaml"
    path.write_text(
        "nodes: 2\ndevices_per_node: 2\ndevice: h100-sxm-80gb\nsweeps:\n- gather.txt\n"
        "- {file: plain.txt, kind: all_reduce, nodes: 1, ranks_per_node: 2}\n"
    )
    cluster = ClusterSpec.parse(path)
    assert [sweep.kind for sweep in cluster.sweeps] == ["all_gather", "all_reduce"]
    group = AxisGroup(nodes=2, ranks_per_node=2, groups_per_node=1)
    assert collective_time_s("all_gather", 1 << 20, group, cluster) == pytest.approx(55.4e-6)
    again = ClusterSpec.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert again == cluster
    assert hash(again) == hash(cluster)
    path.write_text("devices_per_node: 2\ndevice: h100-sxm-80gb\nsweeps: gather.txt\n")
    with pytest.raises(ClusterError, match="sweeps must be a list of files"):
        ClusterSpec.parse(path)


def test_prices_between_the_points_by_hand() -> None:
    cluster = swept((1024, 30e-6), (1 << 20, 60e-6), (1 << 30, 3e-3))
    assert collective_time_s("all_gather", 1 << 20, TWO_NODES, cluster) == pytest.approx(60e-6)
    # half of the way in the logarithm of bytes is half of the way in the logarithm of seconds
    assert collective_time_s("all_gather", 1 << 25, TWO_NODES, cluster) == pytest.approx((60e-6 * 3e-3) ** 0.5)


def test_beyond_the_ends_the_model_goes_on_from_the_measured_times() -> None:
    cluster = swept((1 << 20, 60e-6), (1 << 30, 6e-3))
    for nbytes, end, time_s in ((1 << 12, 1 << 20, 60e-6), (1 << 34, 1 << 30, 6e-3)):
        modelled = [collective_time_s("all_gather", size, TWO_NODES, CLUSTER) for size in (nbytes, end)]
        expected = time_s * modelled[0] / modelled[1]
        assert collective_time_s("all_gather", nbytes, TWO_NODES, cluster) == pytest.approx(expected)


def test_other_shapes_are_scaled_and_one_node_does_not_speak_for_several() -> None:
    cluster = swept(
        *[(size, 2 * collective_time_s("all_gather", size, TWO_NODES, CLUSTER)) for size in (1024, 1 << 20)]
    )
    four = AxisGroup(nodes=4, ranks_per_node=8, groups_per_node=1)
    for kind in ("all_gather", "reduce_scatter"):
        twice = 2 * collective_time_s(kind, 1 << 20, four, CLUSTER)
        assert collective_time_s(kind, 1 << 20, four, cluster) == pytest.approx(twice)
        alone = collective_time_s(kind, 1 << 20, ONE_NODE, CLUSTER)
        assert collective_time_s(kind, 1 << 20, ONE_NODE, cluster) == alone
    assert collective_time_s("all_reduce", 1, four, cluster) == collective_time_s("all_reduce", 1, four, CLUSTER)


def test_groups_that_share_cards_are_slower_than_the_swept_group() -> None:
    few_cards = dataclasses.replace(CLUSTER, cards_per_node=2)
    cluster = few_cards.with_sweep(make_sweep("all_gather", 4, 1, [(1 << 20, 1e-4), (1 << 30, 2e-2)]))
    alone, shared = (AxisGroup(nodes=4, ranks_per_node=1, groups_per_node=count) for count in (1, 8))
    times = [collective_time_s("all_gather", 1 << 30, group, cluster) for group in (alone, shared)]
    assert times[0] == pytest.approx(2e-2)
    assert times[1] > 3 * times[0]


def test_a_later_sweep_replaces_an_earlier_one_of_the_same_shape() -> None:
    cluster = swept((1024, 1.0)).with_sweep(make_sweep("all_gather", 2, 8, [(1024, 2.0), (1024, 3.0)]))
    assert len(cluster.sweeps) == 1
    assert cluster.sweeps[0].times_s == (2.0,)


@given(values=st.lists(st.floats(-50, 50), max_size=12))
def test_non_decreasing_preserves_increasing_values_and_the_mean(values: list[float]) -> None:
    found = non_decreasing(values)
    assert list(found) == sorted(found)
    assert sum(found) == pytest.approx(sum(values), abs=1e-9)
    assert non_decreasing(sorted(values)) == pytest.approx(sorted(values))


points = st.dictionaries(st.integers(1, 1 << 34), st.floats(1e-6, 1.0), min_size=1, max_size=8)
shapes = st.sampled_from([(1, 4), (1, 8), (2, 8), (4, 1), (4, 8)])


@given(
    kind=st.sampled_from(KINDS),
    sweep_kind=st.sampled_from(KINDS),
    measured=points,
    shape=shapes,
    group=shapes,
    nbytes=st.integers(0, 1 << 36),
    more=st.integers(0, 1 << 36),
)
def test_time_never_falls_as_bytes_grow_whatever_was_measured(
    kind: CollectiveKind,
    sweep_kind: CollectiveKind,
    measured: dict[int, float],
    shape: tuple[int, int],
    group: tuple[int, int],
    nbytes: int,
    more: int,
) -> None:
    cluster = CLUSTER.with_sweep(make_sweep(sweep_kind, *shape, measured.items()))
    at = AxisGroup(nodes=group[0], ranks_per_node=group[1], groups_per_node=1)
    time_s = collective_time_s(kind, nbytes, at, cluster)
    assert (time_s > 0) == (nbytes > 0)
    assert collective_time_s(kind, nbytes + more, at, cluster) >= time_s * (1 - 1e-12)
    alone = AxisGroup(nodes=1, ranks_per_node=1, groups_per_node=1)
    assert collective_time_s(kind, nbytes, alone, cluster) == 0.0


@given(
    kind=st.sampled_from(KINDS),
    measured=points,
    shape=shapes,
    group=shapes,
    nbytes=st.integers(1, 1 << 36),
    factor=st.floats(1, 100),
    link=st.sampled_from(["intra_node", "inter_node"]),
)
def test_time_never_rises_when_a_link_becomes_faster_than_it_was_swept(
    kind: CollectiveKind,
    measured: dict[int, float],
    shape: tuple[int, int],
    group: tuple[int, int],
    nbytes: int,
    factor: float,
    link: str,
) -> None:
    cluster = CLUSTER.with_sweep(make_sweep(kind, *shape, measured.items()))
    old = getattr(cluster, link)
    better = dataclasses.replace(
        old, bandwidth_bytes_per_s=old.bandwidth_bytes_per_s * factor, latency_s=old.latency_s / factor
    )
    at = AxisGroup(nodes=group[0], ranks_per_node=group[1], groups_per_node=1)
    faster = dataclasses.replace(cluster, **{link: better})
    assert collective_time_s(kind, nbytes, at, faster) <= collective_time_s(kind, nbytes, at, cluster) * (1 + 1e-12)


def test_a_round_trip_preserves_the_measured_links() -> None:
    sweep = swept((1024, 30e-6), (2048, 31e-6)).sweeps[0]
    assert sweep.inter_node == CLUSTER.inter_node
    assert read_sweep(json.loads(json.dumps(sweep.to_dict()))) == sweep
