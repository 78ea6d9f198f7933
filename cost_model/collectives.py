"""Seconds for one collective on one axis of one cluster.

Every algorithm is a straight line, ``latency_s + nbytes * seconds_per_byte``; a collective takes the fastest of its
lines, as NCCL chooses its algorithm and protocol. So its time is concave and rising in nbytes.

The form and the constants are NCCL's (2.30.7 @5067397, src/graph/tuning.cc, digest in shared/truth/nccl_model.md),
with three parts that it has no model for or states in another form: in-switch reduction (NVLS), all-to-all and
send/recv. Write n = ranks of the group, N = nodes it spans, R = n/N ranks per node, B = rate of one device's link,
C = rate of the network cards that the group has in one node, S = nbytes.

    ring         all_reduce: 2(n-1) steps of S/n; all_gather, reduce_scatter: n-1 steps; broadcast: n-1 hops, all of S
                 at min(B, C): each of the group's rings enters and leaves each node through a card
    tree         all_reduce: up and down, 2((R-1) hops inside + log2(N) hops between nodes)
                 at 0.92 min(B/2, C/2), but C for N = 2, where the two nodes exchange
    NVLS         all_reduce: each device sends its S and receives the S/n that it sums, while the switch multiplies
                 the results: S(1 + 1/R)/(B * efficiency), and C as for the tree
    all_to_all   S(R-1)/n inside at B; R ranks' S(n-R)/n through the cards at C
    send_recv    every rank sends S to the next rank of the axis, one of them per node through the cards

Known error, nothing fitted (2026-11, published rows of shared/truth/collectives.csv, printed by
benchmarks/collectives_accuracy.py; all-reduce, all-gather and reduce-scatter, median): 8 % for 256 MiB and more in
one node (1 % on H100 and H200), 14 % on several; 25 to 45 % below; 36 to 62 % under 1 MiB. Almost all too low: host
launch, skew and transport are not in NCCL's constants. MI250X is off by 2x and more.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from cost_model.cluster import ClusterError, ClusterSpec

if TYPE_CHECKING:  # layout imports torch, which prices do not need
    from cost_model.layout import MeshSpec

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]

NVLS_LATENCY_S = 25e-6
"""NVLS, inside a node. NCCL tuning.cc hwLat; with nodes, NVLSTree adds 2 log2(N) of the next."""
NVLS_TREE_HOP_S = 20.9e-6

TREE_EFFICIENCY = 0.92
"""Share of the bandwidth that a tree reaches. NCCL tuning.cc."""

LL_MAX_BYTES_PER_S = {2: 39e9, 3: 20.4e9}
"""Ceiling of the LL protocol's bus bandwidth on 2 nodes, and on 3 or more. NCCL tuning.cc llMaxBws, hosts with Intel
CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How NCCL moves data, relative to the LL protocol's latencies, which the catalogue holds.

    Attributes:
        launch: factor on ``DeviceSpec.collective_launch_s`` (NCCL: 6.6, 14 and 8.4 us).
        ring_hop, tree_hop: factors on a link's ``latency_s``, (inside a node, between nodes). NCCL, in us: Ring 0.6,
            1.9, 3.4 inside and 2.7, 4.0, 14 between; Tree 0.6, 1.25, 4.0 inside and 5.0, 8.5, 14 between.
        ring_share, tree_share: share of the bus bandwidth reached, (one node, several).
        capped: whether LL_MAX_BYTES_PER_S holds.
    """

    name: str
    launch: float
    ring_hop: tuple[float, float]
    tree_hop: tuple[float, float]
    ring_share: tuple[float, float]
    tree_share: tuple[float, float]
    capped: bool = False


NCCL_PROTOCOLS = (
    Protocol(
        name="LL",
        launch=1.0,
        ring_hop=(1.0, 1.0),
        tree_hop=(1.0, 5.0 / 2.7),
        ring_share=(
            0.39,
            0.5,
        ),  # 0.39 = llMaxBws over NCCL's link rate: 141/360 on Hopper, 282/720 on Blackwell, 87.7/240 on Ampere
        tree_share=(1 / 3.8, 1 / 3.8),
        capped=True,
    ),
    Protocol(
        name="LL128",
        launch=14 / 6.6,
        ring_hop=(1.9 / 0.6, 4.0 / 2.7),
        tree_hop=(1.25 / 0.6, 8.5 / 2.7),
        ring_share=(0.92, 0.92),
        tree_share=(7 / 9, 120 / 128),
    ),
    Protocol(
        name="Simple",
        launch=8.4 / 6.6,
        ring_hop=(3.4 / 0.6, 14 / 2.7),
        tree_hop=(4.0 / 0.6, 14 / 2.7),
        ring_share=(1.0, 1.0),
        tree_share=(1.0, 1.0),
    ),
)
PLAIN_PROTOCOLS = (
    Protocol(
        name="plain", launch=1.0, ring_hop=(1.0, 1.0), tree_hop=(1.0, 1.0), ring_share=(1.0, 1.0), tree_share=(1.0, 1.0)
    ),
)
"""For devices of kind ``cpu``: latency and bandwidth as the catalogue says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroup:
    """One group of ranks that communicate along an axis: ``ranks_per_node`` ranks in each of ``nodes`` nodes.

    ``groups_per_node`` groups of the axis use a node's network cards at the same time.
    """

    nodes: int
    ranks_per_node: int
    groups_per_node: int

    def __post_init__(self) -> None:
        if min(self.nodes, self.ranks_per_node, self.groups_per_node) < 1:
            raise ValueError(f"{self} has a count below 1")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node


class CostLine(NamedTuple):
    """One algorithm's time: ``latency_s + nbytes * seconds_per_byte``."""

    algorithm: str
    latency_s: float
    seconds_per_byte: float


@functools.lru_cache(maxsize=4096)
def axis_group(mesh: MeshSpec, axis: str, cluster: ClusterSpec) -> AxisGroup:
    """Return how the groups of ``axis`` lie on the nodes, where ranks are row-major and rank r is on node r //
    devices_per_node.

    Where groups lie differently (6 devices per node, an axis of 4), the one that spans most nodes stands for all, and
    uneven groups are rounded up.

    Raises:
        ClusterError: the mesh has more devices than the cluster, or no such axis.
    """
    if mesh.size > cluster.size:
        raise ClusterError(
            f"mesh {mesh} has {mesh.size} devices, the cluster {cluster.name} only {cluster.size}; take a smaller mesh"
        )
    if axis not in mesh.names:
        raise ClusterError(f"mesh {mesh} has no axis {axis!r}; it has {', '.join(mesh.names)}")
    ranks = np.moveaxis(np.arange(mesh.size).reshape(mesh.shape), mesh.names.index(axis), -1)
    node_of = (
        ranks.reshape(-1, mesh.axis_size(axis)) // cluster.devices_per_node
    )  # [group, rank along the axis], rising
    starts = np.concatenate([np.ones((len(node_of), 1), dtype=bool), node_of[:, 1:] != node_of[:, :-1]], axis=1)
    spans = starts.sum(axis=1)
    nodes = int(spans.max())
    groups_on_node = np.bincount(node_of[starts])
    return AxisGroup(
        nodes=nodes,
        ranks_per_node=math.ceil(mesh.axis_size(axis) / nodes),
        groups_per_node=int(groups_on_node.max()),
    )


def card_rate_bytes_per_s(group: AxisGroup, cluster: ClusterSpec) -> float:
    """Return the rate at which one group leaves (or enters) one node, in bytes per second.

    The groups share the node's cards evenly; a rank uses one card at most, or its part of them where there are more
    cards than devices.
    """
    cards_per_rank = max(1.0, cluster.cards_per_node / cluster.devices_per_node)
    cards = min(group.ranks_per_node * cards_per_rank, cluster.cards_per_node / group.groups_per_node)
    return cards * cluster.inter_node.bandwidth_bytes_per_s * cluster.inter_node.efficiency


@functools.lru_cache(maxsize=65536)
def collective_lines(kind: CollectiveKind, group: AxisGroup, cluster: ClusterSpec) -> tuple[CostLine, ...]:
    """Return the algorithms that can carry out the collective, each with its line; the collective takes the fastest.

    Raises:
        ValueError: ``kind`` is none of ``CollectiveKind``.
    """
    if kind not in get_args(CollectiveKind):
        raise ValueError(f"unknown collective {kind!r}; known: {', '.join(get_args(CollectiveKind))}")
    if group.size == 1:
        return (CostLine("none", 0.0, 0.0),)
    if kind == "all_to_all":
        return (_all_to_all(group, cluster),)
    if kind == "send_recv":
        return (_send_recv(group, cluster),)
    protocols = PLAIN_PROTOCOLS if cluster.device.kind == "cpu" else NCCL_PROTOCOLS
    lines = [_ring(kind, protocol, group, cluster) for protocol in protocols]
    if kind == "all_reduce":
        lines += [_tree(protocol, group, cluster) for protocol in protocols]
        if 0 < cluster.device.nvls_min_ranks <= group.ranks_per_node:
            lines.append(_in_switch(group, cluster))
    return tuple(lines)


def collective_time_s(kind: CollectiveKind, nbytes: int, group: AxisGroup, cluster: ClusterSpec) -> float:
    """Return the seconds that one collective takes; 0.0 for a group of one or for no bytes.

    Args:
        kind: the collective.
        nbytes: the full buffer, as nccl-tests counts it: what an all_gather returns, what a reduce_scatter is given,
            the buffer of an all_reduce or broadcast, all that one rank holds in an all_to_all (its own part included),
            a send_recv's message.
        group: how the ranks lie on the nodes, from ``axis_group``.
        cluster: devices and links.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; it cannot be negative")
    if nbytes == 0:
        return 0.0
    return min(line.latency_s + nbytes * line.seconds_per_byte for line in collective_lines(kind, group, cluster))


def collective_times_s(
    kind: CollectiveKind, nbytes: NDArray[np.generic], group: AxisGroup, cluster: ClusterSpec
) -> NDArray[np.float64]:
    """Return ``collective_time_s`` for each element of ``nbytes``, in its shape."""
    sizes = np.asarray(nbytes, dtype=np.float64)
    if np.any(sizes < 0):
        raise ValueError("nbytes holds a negative size")
    lines = collective_lines(kind, group, cluster)
    times = np.min([line.latency_s + sizes * line.seconds_per_byte for line in lines], axis=0)
    return np.asarray(np.where(sizes > 0, times, 0.0), dtype=np.float64)


def _rates(group: AxisGroup, cluster: ClusterSpec) -> tuple[float, float]:
    """Return (rate of a device's link inside the node, rate of the group's cards in a node); infinite where unused."""
    inside = cluster.intra_node.rate_bytes_per_s(group.ranks_per_node) if group.ranks_per_node > 1 else math.inf
    between = card_rate_bytes_per_s(group, cluster) if group.nodes > 1 else math.inf
    return inside, between


def _hops_s(hop: tuple[float, float], inside: float, between: float, cluster: ClusterSpec) -> float:
    return inside * hop[0] * cluster.intra_node.latency_s + between * hop[1] * cluster.inter_node.latency_s


def _capped(rate: float, protocol: Protocol, nodes: int) -> float:
    return min(rate, LL_MAX_BYTES_PER_S[min(nodes, 3)]) if protocol.capped and nodes > 1 else rate


def _ring(kind: CollectiveKind, protocol: Protocol, group: AxisGroup, cluster: ClusterSpec) -> CostLine:
    rounds = 2 if kind == "all_reduce" else 1
    n, several = group.size, group.nodes > 1
    between = group.nodes - 1
    latency_s = protocol.launch * cluster.device.collective_launch_s
    latency_s += rounds * _hops_s(protocol.ring_hop, n - 1 - between, between, cluster)
    rate = _capped(min(_rates(group, cluster)) * protocol.ring_share[several], protocol, group.nodes)
    moved = 1.0 if kind == "broadcast" else rounds * (n - 1) / n
    return CostLine(f"ring {protocol.name}", latency_s, moved / rate)


def _tree(protocol: Protocol, group: AxisGroup, cluster: ClusterSpec) -> CostLine:
    latency_s = protocol.launch * cluster.device.collective_launch_s
    latency_s += 2 * _hops_s(protocol.tree_hop, group.ranks_per_node - 1, math.log2(group.nodes), cluster)
    inside, between = _rates(group, cluster)
    bus = TREE_EFFICIENCY * min(inside, between if group.nodes > 2 else 2 * between)
    rate = _capped(bus * protocol.tree_share[group.nodes > 1], protocol, group.nodes) / 2
    return CostLine(f"tree {protocol.name}", latency_s, 1 / rate)


def _in_switch(group: AxisGroup, cluster: ClusterSpec) -> CostLine:
    inside, between = _rates(group, cluster)
    seconds_per_byte = (1 + 1 / group.ranks_per_node) / (inside * cluster.device.nvls_efficiency)
    seconds_per_byte = max(seconds_per_byte, (2 if group.nodes > 2 else 1) / between)
    return CostLine("nvls", NVLS_LATENCY_S + 2 * math.log2(group.nodes) * NVLS_TREE_HOP_S, seconds_per_byte)


def _all_to_all(group: AxisGroup, cluster: ClusterSpec) -> CostLine:
    """One message to each peer, each issued after the last (a hop's latency each), inside and between nodes at once."""
    inside, between = _rates(group, cluster)
    n, in_node = group.size, group.ranks_per_node
    latency_s = cluster.device.collective_launch_s + _hops_s((1.0, 1.0), in_node - 1, n - in_node, cluster)
    return CostLine("pairs", latency_s, max((in_node - 1) / n / inside, in_node * (n - in_node) / n / between))


def _send_recv(group: AxisGroup, cluster: ClusterSpec) -> CostLine:
    several = group.nodes > 1
    one_rank = AxisGroup(nodes=group.nodes, ranks_per_node=1, groups_per_node=group.groups_per_node)
    rate = card_rate_bytes_per_s(one_rank, cluster) if several else cluster.intra_node.rate_bytes_per_s(2)
    latency_s = cluster.device.collective_launch_s + _hops_s((1.0, 1.0), 0 if several else 1, int(several), cluster)
    return CostLine("pair", latency_s, 1 / rate)
