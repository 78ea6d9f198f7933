"""Seconds of an all-reduce with reduction in the NVLink switch (NVLS), and of NVLSTree between nodes.

With R ranks per node, each device sends its S bytes and receives the S/R bytes that it sums; the switch multicasts the
results. With B the rate of a device's link, this takes

    S(1 + 1/R) / (B * efficiency)

Between nodes, a tree over network cards with the rate C takes 2S/C, or S/C for two nodes, which exchange their sums.
The slower of both counts.

Source: latencies of NCCL 2.30.7 @5067397, src/graph/tuning.cc hwLat (read 2026-11); the form is derived. Known error:
within 2 % of the plateaus of H100, H200 and B200 for 5 to 8 ranks (NCCL's own form, by channels, is 14 % low on B200).
Racks of 72 reach less: see ``nvls_efficiency`` of gb200-nvl72-186gb in devices.toml.
"""

from __future__ import annotations

import math

from cost_model.collectives.axis_groups import AxisGroup
from cost_model.collectives.nccl import CostLine, hops_s, rates_bytes_per_s
from cost_model.hardware.cluster import ClusterSpec

NVLS_LATENCY_S = 25e-6
"""Seconds of latency of NVLS inside a node. Source: NCCL 2.30.7 tuning.cc hwLat."""
NVLS_TREE_HOP_S = 18.2e-6
"""Seconds that NVLSTree adds to the card's latency in each of the 2 log2(N) hops between nodes. Source: NCCL 2.30.7
tuning.cc hwLat: 20.9 us, of which 2.7 us are the LL protocol's hop."""


def nvls_line(group: AxisGroup, cluster: ClusterSpec) -> CostLine | None:
    """Return the cost line of an all-reduce in the switch; None for devices without NVLS, and for too few ranks."""
    if not 0 < cluster.device.nvls_min_ranks <= group.ranks_per_node:
        return None
    inside, between = rates_bytes_per_s(group, cluster)
    seconds_per_byte = (1 + 1 / group.ranks_per_node) / (inside * cluster.device.nvls_efficiency)
    seconds_per_byte = max(seconds_per_byte, (2 if group.nodes > 2 else 1) / between)
    latency_s = NVLS_LATENCY_S + hops_s((0.0, NVLS_TREE_HOP_S), 0, 2 * math.log2(group.nodes), cluster)
    return CostLine("nvls" if group.nodes == 1 else "NVLSTree", "nvls", latency_s, seconds_per_byte)
