"""Groups of ranks along a mesh axis: their placement on nodes, and the rates of the network cards that they share."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cost_model.hardware.cluster import ClusterError, ClusterSpec

if TYPE_CHECKING:  # layout imports torch, and prices do not need it
    from cost_model.layouts.layout import MeshSpec

RANKS_WITH_CARDS = 8
"""Maximum number of ranks in one node whose network cards one ring or tree uses.

NVLink domains of 72 devices with a card each send at about the rate of 8 cards, as nodes of 8 devices do: bus bandwidth
811 GB/s on 2 racks, 406 GB/s on 20 (16 GiB). Source: coreweave/nccl-tests README @cb86553, GB200, NCCL 2.26.2 (rows
C0559-C0570 of collectives.csv, a calibration source), 2026-11."""


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


def axis_group(mesh: MeshSpec, axis: str, cluster: ClusterSpec) -> AxisGroup:
    """Return how the groups along ``axis`` lie on the nodes; see `axes_group`."""
    return axes_group(mesh, (axis,), cluster)


@functools.lru_cache(maxsize=4096)
def axes_group(mesh: MeshSpec, axes: tuple[str, ...], cluster: ClusterSpec) -> AxisGroup:
    """Return how the process groups along one axis, or along several axes taken as one, lie on the nodes.

    Ranks are row-major, and rank r is on node r // devices_per_node. Where the groups of an axis differ (6 devices per
    node, an axis of 4), the largest number of nodes that one of them spans and the largest number of groups on one node
    count, and ``ranks_per_node`` is rounded up.

    Raises:
        ClusterError: the mesh has more devices than the cluster, or no such axis.
    """
    if mesh.size > cluster.size:
        raise ClusterError(
            f"mesh {mesh} has {mesh.size} devices, the cluster {cluster.name} only {cluster.size}; take a smaller mesh"
        )
    for axis in axes:
        if axis not in mesh.names:
            raise ClusterError(f"mesh {mesh} has no axis {axis!r}; it has {', '.join(mesh.names)}")
    places = sorted(mesh.names.index(axis) for axis in axes)
    size = math.prod(mesh.shape[place] for place in places)
    ranks = np.moveaxis(np.arange(mesh.size).reshape(mesh.shape), places, range(-len(places), 0))
    node_of = ranks.reshape(-1, size) // cluster.devices_per_node  # [group, rank along the axes], rising
    starts = np.concatenate([np.ones((len(node_of), 1), dtype=bool), node_of[:, 1:] != node_of[:, :-1]], axis=1)
    spans = starts.sum(axis=1)
    nodes = int(spans.max())
    groups_on_node = np.bincount(node_of[starts])
    return AxisGroup(
        nodes=nodes,
        ranks_per_node=math.ceil(size / nodes),
        groups_per_node=int(groups_on_node.max()),
    )


def card_rate_bytes_per_s(group: AxisGroup, cluster: ClusterSpec) -> float:
    """Return the bytes per second that one group's ring or tree sends out of (or into) one node by its network cards.

    The groups of the axis on a node share its cards evenly. A rank uses one card, or its share of the cards if the node
    has more cards than devices. At most RANKS_WITH_CARDS ranks use cards. On a rail-optimized fabric rings and trees
    stay on their rail; otherwise they cross the over-subscribed switches.
    """
    crossing = 1.0 if cluster.rail_optimized else cluster.oversubscription
    return _cards(group, cluster, RANKS_WITH_CARDS) * _card_bytes_per_s(cluster) / crossing


def pair_card_rate_bytes_per_s(group: AxisGroup, cluster: ClusterSpec) -> float:
    """Return the bytes per second at which messages between pairs of one group leave one node.

    Every rank sends through its own card. The two ranks of a pair can be anywhere, so messages cross the
    over-subscribed switches.
    """
    return _cards(group, cluster, group.ranks_per_node) * _card_bytes_per_s(cluster) / cluster.oversubscription


def _card_bytes_per_s(cluster: ClusterSpec) -> float:
    return cluster.inter_node.bandwidth_bytes_per_s * cluster.inter_node.efficiency


def _cards(group: AxisGroup, cluster: ClusterSpec, most_ranks: int) -> float:
    cards_per_rank = max(1.0, cluster.cards_per_node / cluster.devices_per_node)
    return min(min(group.ranks_per_node, most_ranks) * cards_per_rank, cluster.cards_per_node / group.groups_per_node)
