"""Seconds of context parallelism in one layer: keys and values around the ring, and what is made of each block."""

from __future__ import annotations

from cost_model.cluster import ClusterSpec
from cost_model.parallelism import ParallelSpec
from cost_model.rank_groups import group_time_s
from cost_model.step_constants import StepConstants
from cost_model.step_kernels import stream_s
from cost_model.transformer import TransformerSpec

MERGE_FORWARD, MERGE_BACKWARD = 32.5, 50.5
"""Bytes that torch's _context_parallel/_attention.py (2.13) moves per value of the queries and block of keys, counted
2026-11-21, half of the blocks being whole and half of them half, as its load balancing has it.

Forward, after the first block: the result cast (2 read, 4 written), its difference from the sum (8, 4), times the
weight (4, 4), their difference (8, 4); half of that, and the sum written again (4, 4). Backward: gradients of queries,
keys and values added (6, 4 each); where half, half of that, and the sum written again; those of keys and values joined
to be sent (4, 4 each)."""


def merge_seconds(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants
) -> tuple[float, float]:
    """Return the seconds in which results, and gradients, of the blocks of keys are added up."""
    if parallel.context == 1 or not parallel.implementation.context_merges:
        return 0.0, 0.0
    values = parallel.tokens * spec.query_dim / parallel.tensor
    forward, backward = MERGE_FORWARD * (parallel.context - 1) * values, MERGE_BACKWARD * parallel.context * values
    return (
        stream_s(forward, fused=False, device=cluster.device, constants=constants),
        stream_s(backward, fused=False, device=cluster.device, constants=constants),
    )


def context_seconds(spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec) -> tuple[float, float]:
    """Return the seconds in which keys and values go once around the context ring, forward, and with gradients."""
    if parallel.context == 1:
        return 0.0, 0.0
    width = 2 * spec.query_dim if parallel.implementation.context_merges else spec.key_dim + spec.value_dim
    nbytes = 2.0 * parallel.tokens * width / parallel.tensor
    hop = group_time_s("send_recv", nbytes, size=parallel.context, stride=parallel.tensor, cluster=cluster)
    return hop * (parallel.context - 1), 2 * hop * (parallel.context - 1)
