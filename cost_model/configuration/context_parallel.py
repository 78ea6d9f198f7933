"""Seconds of context parallelism in one layer: keys and values around the ring, and what is made of each block."""

from __future__ import annotations

from cost_model.configuration.kernels import stream_s
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.rank_groups import group_time_s, strided_group
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.in_step import message_share
from cost_model.kernels.step_constants import StepConstants

MERGE_FORWARD, MERGE_BACKWARD = 32.5, 50.5
"""Bytes that torch's _context_parallel/_attention.py (2.13) moves per value of the queries and block of keys, counted
2026-11-21, half of the blocks being whole and half of them half, as its load balancing has it.

Forward, after the first block: the result cast (2 read, 4 written), its difference from the sum (8, 4), times the
weight (4, 4), their difference (8, 4); half of that, and the sum written again (4, 4). Backward: gradients of queries,
keys and values added (6, 4 each); where half, half of that, and the sum written again; those of keys and values joined
to be sent (4, 4 each)."""

FIRST_BLOCK, LATER_BLOCK = 4.0, 6.0
"""The same of Transformer Engine, each way: of results forward, of queries, keys and values backward, for the first
block (2 read, 2 written) and for each later one (2 and 2 read, 2 written). Each is one kernel. Under a causal mask half
of the later ones are of half of the rows. Counted 2026-11-24 in
attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVP2P."""


def merge_seconds(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants
) -> tuple[float, float]:
    """Return the seconds in which results, and gradients, of the blocks of keys are added up."""
    if parallel.context == 1:
        return 0.0, 0.0
    blocks, fused = parallel.context, not parallel.implementation.context_merges
    results, queries, keys = (
        parallel.tokens * dim / parallel.tensor
        for dim in (spec.attention_out_dim, spec.query_dim, spec.key_dim + spec.value_dim)
    )
    if fused:
        per_value = FIRST_BLOCK + LATER_BLOCK * (0.75 if spec.causal else 1.0) * (blocks - 1)
        forward, backward = per_value * results, per_value * (queries + keys)
    else:
        forward, backward = MERGE_FORWARD * (blocks - 1) * results, MERGE_BACKWARD * blocks * queries
    return (
        stream_s(forward, fused=fused, device=cluster.device, constants=constants),
        stream_s(backward, fused=fused, device=cluster.device, constants=constants),
    )


def context_seconds(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, attention: tuple[float, float]
) -> tuple[float, float]:
    """Return what keys and values that go once around the context ring add, forward, and with gradients backward.

    Each hop runs beside attention to the block that is there: what is longer shows, what hides slows that down.

    Args:
        attention: seconds of one rank's, forward and backward.
    """
    if parallel.context == 1:
        return 0.0, 0.0
    width = 2 * spec.query_dim if parallel.implementation.context_merges else spec.key_dim + spec.value_dim
    nbytes = 2.0 * parallel.tokens * width / parallel.tensor
    hop = group_time_s("send_recv", nbytes, size=parallel.context, stride=parallel.tensor, cluster=cluster)
    group = strided_group(parallel.context, parallel.tensor, cluster.devices_per_node)
    hops, taken = parallel.context - 1, message_share(cluster.device, nodes=group.nodes)

    def added(moved: float, computed: float) -> float:
        shown = max(0.0, moved - computed / parallel.context)
        return hops * (shown + taken * (moved - shown))

    return added(hop, attention[0]), added(2 * hop, attention[1])
