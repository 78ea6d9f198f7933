"""All-reduce with reduction in the NVLink switch (NVLS), and NVLSTree between nodes.

Each device sends its S bytes and receives the S/n that it sums, while the switch multiplies the results:

    S(1 + 1/R) / (B * efficiency)      R ranks per node, B the rate of a device's link

and between nodes a tree over the cards at C: 2S/C, S/C for two nodes, which exchange. Latencies are NCCL's (2.30.7
@5067397, src/graph/tuning.cc hwLat). Within 2 % of the plateaus of H100, H200 and B200 for 5 to 8 ranks; NCCL's own
form (channels, 2.30) is 14 % low on B200. Racks of 72 reach less, see ``devices.gb200-nvl72-186gb``.
"""

from __future__ import annotations

import math

from cost_model.collectives.axis_groups import AxisGroup
from cost_model.collectives.nccl import CostLine, hops_s, rates_bytes_per_s
from cost_model.hardware.cluster import ClusterSpec

NVLS_LATENCY_S = 25e-6
"""NVLS, inside a node. NCCL tuning.cc hwLat."""
NVLS_TREE_HOP_S = 18.2e-6
"""NVLSTree, what each of the 2 log2(N) hops between nodes takes beyond the card's latency. NCCL tuning.cc hwLat: 20.9
us, of which 2.7 are the LL protocol's hop."""


def nvls_line(group: AxisGroup, cluster: ClusterSpec) -> CostLine | None:
    """Return the line of an all-reduce in the switch, None where the device or the number of ranks has none."""
    if not 0 < cluster.device.nvls_min_ranks <= group.ranks_per_node:
        return None
    inside, between = rates_bytes_per_s(group, cluster)
    seconds_per_byte = (1 + 1 / group.ranks_per_node) / (inside * cluster.device.nvls_efficiency)
    seconds_per_byte = max(seconds_per_byte, (2 if group.nodes > 2 else 1) / between)
    latency_s = NVLS_LATENCY_S + hops_s((0.0, NVLS_TREE_HOP_S), 0, 2 * math.log2(group.nodes), cluster)
    return CostLine("nvls" if group.nodes == 1 else "NVLSTree", "nvls", latency_s, seconds_per_byte)
