"""Seconds of context parallelism in one layer: sending keys and values around the ring, and merging blocks' results.

Every hop overlaps with attention to the block that has arrived. A hop is exposed for as long as it takes longer than
that attention. The overlapped part slows attention by the share of processors that messages occupy
(``kernels.in_step``).

Known error: the accuracy table (benchmarks/results/accuracy.md) includes rows with context parallelism. The predictions
for torchtitan in 8 bits over 4 and 8 ranks are 19 to 30 % too fast.
"""

from __future__ import annotations

from cost_model.configuration.kernels import stream_s
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.rank_groups import group_time_s, strided_group
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.in_step import message_share
from cost_model.kernels.step_constants import StepConstants

MERGE_FORWARD, MERGE_BACKWARD = 32.5, 50.5
"""Bytes that torch's _context_parallel/_attention.py (2.13) moves per value of the queries and block of keys.

By torch's load balancing, half of the blocks are full blocks and half of them are half blocks; the constants are means
over both kinds. In parentheses: bytes read, bytes written.

Forward, for each block after the first: the result is cast (2, 4), subtracted from the sum (8, 4), multiplied by the
weight (4, 4), subtracted again (8, 4). A half block moves half of these bytes, and copies the sum (4, 4).
Backward, for each block: gradients of queries, keys and values are added (6, 4 each). A half block moves half of these
bytes, and copies the three sums (4, 4 each). Gradients of keys and values are concatenated for sending (4, 4 each).
Counted 2026-11-21."""

FIRST_BLOCK, LATER_BLOCK = 4.0, 6.0
"""Bytes that Transformer Engine moves per value to merge the first block, and each later block, in each pass.

The values are those of the results in forward, and of queries, keys and values in backward. One kernel reads 2 bytes
and writes 2 for the first block. One kernel reads 2 and 2 bytes and writes 2 for each later block. Under a causal mask,
half of the later blocks cover half of the rows. Counted 2026-11-24 in
attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVP2P."""


def merge_seconds(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants
) -> tuple[float, float]:
    """Return the seconds of merging results (forward) and gradients (backward) over the blocks of keys."""
    if parallel.context == 1:
        return 0.0, 0.0
    blocks, fused = parallel.context, not parallel.implementation.kernels.torch_ring_attention
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
    """Return the seconds that ring sends add: in forward of keys and values, in backward of their gradients as well.

    Args:
        attention: seconds of attention on one rank, forward and backward.
    """
    if parallel.context == 1:
        return 0.0, 0.0
    repeated = parallel.implementation.kernels.torch_ring_attention
    width = 2 * spec.query_dim if repeated else spec.key_dim + spec.value_dim
    nbytes = 2.0 * parallel.tokens * width / parallel.tensor
    hop = group_time_s("send_recv", nbytes, size=parallel.context, stride=parallel.tensor, cluster=cluster)
    group = strided_group(parallel.context, parallel.tensor, cluster.devices_per_node)
    hops, share = parallel.context - 1, message_share(cluster.device, nodes=group.nodes)

    def added(hop_s: float, attention_s: float) -> float:
        exposed = max(0.0, hop_s - attention_s / parallel.context)
        return hops * (exposed + share * (hop_s - exposed))

    return added(hop, attention[0]), added(2 * hop, attention[1])
