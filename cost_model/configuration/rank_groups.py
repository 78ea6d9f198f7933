"""The groups of ranks of a parallel configuration on the nodes: tensor ranks innermost, pipeline ranks outermost."""

from __future__ import annotations

import functools
import math

from cost_model.collectives.price import AxisGroup, CollectiveKind, collective_time_s
from cost_model.hardware.cluster import ClusterSpec


@functools.lru_cache(maxsize=4096)
def strided_group(size: int, stride: int, devices_per_node: int) -> AxisGroup:
    """Return the group of ``size`` ranks, ``stride`` apart, where node n has ``devices_per_node`` consecutive ranks.

    All groups of the axis communicate at the same time and share the network cards.
    """
    per_node = max(1, min(size, devices_per_node // stride)) if stride < devices_per_node else 1
    nodes = math.ceil(size / per_node)
    return AxisGroup(
        nodes=nodes, ranks_per_node=per_node, groups_per_node=max(1, devices_per_node // per_node) if nodes > 1 else 1
    )


def group_time_s(kind: CollectiveKind, nbytes: float, *, size: int, stride: int, cluster: ClusterSpec) -> float:
    """Return the seconds of a collective over ``size`` ranks ``stride`` apart; 0.0 for one rank.

    Args:
        nbytes: bytes of the full buffer, as in ``collective_time_s``.
    """
    if size == 1 or nbytes <= 0:
        return 0.0
    return collective_time_s(kind, nbytes, strided_group(size, stride, cluster.devices_per_node), cluster)
