"""Seconds of rings and trees as NCCL runs them: one linear cost line per algorithm and protocol.

Source of form and constants: NCCL 2.30.7 @5067397, src/graph/tuning.cc (read 2026-11). With n = ranks of the group, N =
nodes that the group spans, R = n/N ranks per node, B = rate of one device's link, C = rate of the network cards that
the group has in one node, S = nbytes:

    ring   all_reduce: 2(n-1) steps of S/n; all_gather, reduce_scatter: n-1 steps; broadcast: n-1 hops, all of S
           at min(B, C): each of the group's rings enters and leaves each node through a card
    tree   all_reduce: up and down, 2((R-1) hops inside + log2(N) hops between nodes)
           at 0.92 min(B/2, C/2), but C for N = 2, where the two nodes exchange
    PAT    all_gather, reduce_scatter with one rank per node: log2(N) hops between nodes, and work that grows with n

Known error, nothing fitted: a few percent from 256 MB up; 25 to 60 % too low below 256 MB, where the launch by the
host, skew and the filling of pipelines dominate. ``cost_model.collectives.correction`` accounts for these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cost_model.collectives.axis_groups import AxisGroup, card_rate_bytes_per_s
from cost_model.hardware.cluster import ClusterSpec
from cost_model.hardware.collective_kinds import CollectiveKind

TREE_EFFICIENCY = 0.92
"""Fraction of the bandwidth that a tree reaches. Source: NCCL 2.30.7 tuning.cc."""

LL_MAX_BYTES_PER_S = {2: 39e9, 3: 20.4e9}
"""Number of nodes (2, or 3 for more) -> largest bus bandwidth of the LL protocol in bytes per second. Source: NCCL
2.30.7 tuning.cc llMaxBws, hosts with Intel CPUs."""

PAT_EFFICIENCY = 0.75
PAT_RANK_S = 2.8e-6
PAT_HOP_SHARE = 1 / 3.5
"""PAT: its bandwidth over a ring's, seconds per rank, and its latency of a hop between nodes over the hop's latency in
the Simple protocol. Source: NCCL 2.30.7 tuning.cc."""

Family = Literal["none", "plain", "LL", "LL128", "Simple", "nvls", "pairs"]
"""The kind of a cost line, by which its correction is found; ``none`` and ``plain`` have no correction."""


class CostLine(NamedTuple):
    """The cost line of one algorithm: ``latency_s`` plus the transfer time.

    The transfer time is ``nbytes * seconds_per_byte``, or ``slow_seconds_per_byte`` times the first ``slow_bytes``
    where that is longer.
    """

    algorithm: str
    family: Family
    latency_s: float
    seconds_per_byte: float
    slow_bytes: float = 0.0
    slow_seconds_per_byte: float = 0.0

    def transfer_s(self, nbytes: float) -> float:
        """Return the seconds of the transfer of ``nbytes``, without latency."""
        return max(nbytes * self.seconds_per_byte, min(nbytes, self.slow_bytes) * self.slow_seconds_per_byte)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A protocol of NCCL: its latencies relative to LL's, which the catalogue has, and its fractions of the bandwidth.

    Attributes:
        launch: factor on ``DeviceSpec.collective_launch_s`` (NCCL: LL 6.6, LL128 14 and Simple 8.4 us).
        ring_hop_s, tree_hop_s: seconds of a hop in addition to the link's ``latency_s``, (inside a node, between
            nodes). NCCL has, in us for LL, LL128, Simple: Ring 0.6, 1.9, 3.4 inside and 2.7, 4.0, 14 between; Tree 0.6,
            1.25, 4.0 inside and 5.0, 8.5, 14 between. The latency of a slower link is added to these seconds, which it
            does not multiply.
        ring_share, tree_share: fraction of the bus bandwidth that is reached, (on one node, on several nodes).
        capped: whether LL_MAX_BYTES_PER_S limits the rate.
    """

    name: Literal["LL", "LL128", "Simple", "plain"]
    launch: float = 1.0
    ring_hop_s: tuple[float, float] = (0.0, 0.0)
    tree_hop_s: tuple[float, float] = (0.0, 0.0)
    ring_share: tuple[float, float] = (1.0, 1.0)
    tree_share: tuple[float, float] = (1.0, 1.0)
    capped: bool = False


NCCL_PROTOCOLS = (
    Protocol(
        name="LL",
        tree_hop_s=(0.0, 2.3e-6),
        # 0.39 = llMaxBws over NCCL's link rate: 141/360 on Hopper, 282/720 on Blackwell, 87.7/240 on Ampere
        ring_share=(0.39, 0.5),
        tree_share=(1 / 3.8, 1 / 3.8),
        capped=True,
    ),
    Protocol(
        name="LL128",
        launch=14 / 6.6,
        ring_hop_s=(1.3e-6, 1.3e-6),
        tree_hop_s=(0.65e-6, 5.8e-6),
        ring_share=(0.92, 0.92),
        tree_share=(7 / 9, 120 / 128),
    ),
    Protocol(name="Simple", launch=8.4 / 6.6, ring_hop_s=(2.8e-6, 11.3e-6), tree_hop_s=(3.4e-6, 11.3e-6)),
)
PLAIN_PROTOCOLS = (Protocol(name="plain"),)
"""The protocol of devices of kind ``cpu``: latency and bandwidth of the catalogue."""


def ring_and_tree_lines(kind: CollectiveKind, group: AxisGroup, cluster: ClusterSpec) -> list[CostLine]:
    """Return the cost lines of the rings, trees and PAT that implement ``kind``; rings and trees in each protocol."""
    protocols = PLAIN_PROTOCOLS if cluster.device.kind == "cpu" else NCCL_PROTOCOLS
    lines = [_ring(kind, protocol, group, cluster) for protocol in protocols]
    if kind == "all_reduce":
        lines += [_tree(protocol, group, cluster) for protocol in protocols]
    gathers = kind in ("all_gather", "reduce_scatter")
    if gathers and group.ranks_per_node == 1 and group.nodes > 1 and cluster.device.kind == "cuda":
        lines.append(_pat(group, cluster))
    return lines


def rates_bytes_per_s(group: AxisGroup, cluster: ClusterSpec) -> tuple[float, float]:
    """Return the bytes per second of a device's link inside the node, and of the group's cards in a node.

    A rate that the group does not use is infinite. On a full mesh of links, a ring in one node of R ranks uses R links.
    A group on several nodes uses chains of R-1 links, of which the node has R/(R-1) times as many: 313 GB/s for rings
    and 358 GB/s for chains on MI300X.
    """
    ranks, several = group.ranks_per_node, group.nodes > 1
    inside = cluster.intra_node.rate_bytes_per_s(ranks) if ranks > 1 else math.inf
    if ranks > 1 and several and cluster.intra_node.mesh_peers > 0:
        inside *= ranks / (ranks - 1)
    return inside, card_rate_bytes_per_s(group, cluster) if several else math.inf


def hops_s(hop_s: tuple[float, float], inside: float, between: float, cluster: ClusterSpec) -> float:
    """Return the seconds of ``inside`` hops within nodes and ``between`` hops from node to node.

    A hop takes the latency of its link plus ``hop_s``, (inside a node, between nodes).
    """
    inside_s = inside * (cluster.intra_node.latency_s + hop_s[0])
    return inside_s + between * (cluster.inter_node.latency_s + hop_s[1])


def _capped(rate: float, protocol: Protocol, nodes: int) -> float:
    return min(rate, LL_MAX_BYTES_PER_S[min(nodes, 3)]) if protocol.capped and nodes > 1 else rate


def _ring(kind: CollectiveKind, protocol: Protocol, group: AxisGroup, cluster: ClusterSpec) -> CostLine:
    rounds = 2 if kind == "all_reduce" else 1
    n, several = group.size, group.nodes > 1
    between = group.nodes - 1
    latency_s = protocol.launch * cluster.device.collective_launch_s
    latency_s += rounds * hops_s(protocol.ring_hop_s, n - 1 - between, between, cluster)
    rate = _capped(min(rates_bytes_per_s(group, cluster)) * protocol.ring_share[several], protocol, group.nodes)
    moved = 1.0 if kind == "broadcast" else rounds * (n - 1) / n
    return CostLine(f"ring {protocol.name}", protocol.name, latency_s, moved / rate)


def _tree(protocol: Protocol, group: AxisGroup, cluster: ClusterSpec) -> CostLine:
    latency_s = protocol.launch * cluster.device.collective_launch_s
    latency_s += 2 * hops_s(protocol.tree_hop_s, group.ranks_per_node - 1, math.log2(group.nodes), cluster)
    inside, between = rates_bytes_per_s(group, cluster)
    bus = TREE_EFFICIENCY * min(inside, between if group.nodes > 2 else 2 * between)
    rate = _capped(bus * protocol.tree_share[group.nodes > 1], protocol, group.nodes) / 2
    return CostLine(f"tree {protocol.name}", protocol.name, latency_s, 1 / rate)


def _pat(group: AxisGroup, cluster: ClusterSpec) -> CostLine:
    simple, n = NCCL_PROTOCOLS[2], group.size
    latency_s = simple.launch * cluster.device.collective_launch_s + n * PAT_RANK_S
    latency_s += hops_s(simple.tree_hop_s, 0, math.log2(n) * PAT_HOP_SHARE, cluster)
    rate = PAT_EFFICIENCY * rates_bytes_per_s(group, cluster)[1]
    return CostLine("PAT", "Simple", latency_s, (n - 1) / n / rate)
