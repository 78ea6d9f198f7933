"""Seconds of all-to-all and send/recv: messages between pairs of ranks, for which NCCL has no model.

    all_to_all   each rank sends S(R-1)/n bytes inside the node at the link's rate; at the same time the R ranks of a
                 node send S(n-R)/n bytes each through the node's cards
    send_recv    every rank sends S bytes to the next rank of the axis; one rank per node sends through the cards

with n ranks, R of them per node, and S the bytes of one rank. A rank issues the messages to its peers one after the
other, and each message takes a hop's latency. Messages between pairs do not reach the rate of rings: see ``Shares``. A
single pair inside a node has few channels until its message is large.

Source: fitted to the rows of one cluster (B200) and to two lines of NVIDIA's slides, 2026-11; see collectives.toml.
Known error: not known for small messages of other devices, since none are published. A network that is not tuned for
all-to-all reaches 0.6 of this rate (the same cluster, default settings).
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.collectives.axis_groups import AxisGroup, pair_card_rate_bytes_per_s
from cost_model.collectives.nccl import CostLine, Family, hops_s
from cost_model.hardware.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Fractions of the rates of links and cards that messages between pairs reach; fitted, in ``collectives.toml``.

    Attributes:
        link: fraction of the rate of a device's link inside a node, for large messages.
        card: fraction of the rate of a network card.
        few_channels_bytes_per_s: largest rate of one pair while its message is below ``few_channels_bytes``.
        few_channels_bytes: size of a message above which the time stays constant, until the time at the link's rate is
            longer.
    """

    link: float
    card: float
    few_channels_bytes_per_s: float
    few_channels_bytes: float


PLAIN_SHARES = Shares(link=1.0, card=1.0, few_channels_bytes_per_s=1.0, few_channels_bytes=0.0)
"""The shares of devices of kind ``cpu``."""


def pair_line(kind: str, group: AxisGroup, cluster: ClusterSpec, shares: Shares) -> CostLine:
    """Return the cost line of an ``all_to_all`` or a ``send_recv``."""
    line = _all_to_all if kind == "all_to_all" else _send_recv
    return line(group, cluster, PLAIN_SHARES if cluster.device.kind == "cpu" else shares)


def _all_to_all(group: AxisGroup, cluster: ClusterSpec, shares: Shares) -> CostLine:
    n, in_node = group.size, group.ranks_per_node
    latency_s = cluster.device.collective_launch_s + hops_s((0.0, 0.0), in_node - 1, n - in_node, cluster)
    inside = (in_node - 1) / n / (cluster.intra_node.rate_bytes_per_s(in_node) * shares.link)
    between = 0.0
    if group.nodes > 1:
        between = in_node * (n - in_node) / n / (pair_card_rate_bytes_per_s(group, cluster) * shares.card)
    return CostLine("pairs", _family(cluster), latency_s, max(inside, between))


def _send_recv(group: AxisGroup, cluster: ClusterSpec, shares: Shares) -> CostLine:
    if group.nodes > 1:
        one_rank = AxisGroup(nodes=group.nodes, ranks_per_node=1, groups_per_node=group.groups_per_node)
        latency_s = cluster.device.collective_launch_s + hops_s((0.0, 0.0), 0, 1, cluster)
        rate = pair_card_rate_bytes_per_s(one_rank, cluster) * shares.card
        return CostLine("pair", _family(cluster), latency_s, 1 / rate)
    latency_s = cluster.device.collective_launch_s + hops_s((0.0, 0.0), 1, 0, cluster)
    seconds_per_byte = 1 / (cluster.intra_node.rate_bytes_per_s(2) * shares.link)
    slow = 1 / shares.few_channels_bytes_per_s
    return CostLine("pair", _family(cluster), latency_s, seconds_per_byte, shares.few_channels_bytes, slow)


def _family(cluster: ClusterSpec) -> Family:
    return "plain" if cluster.device.kind == "cpu" else "pairs"
