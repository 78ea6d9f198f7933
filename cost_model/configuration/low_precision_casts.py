"""Bytes that casts of a layer's linears to 8 or 4 bits move, by who shares them and when they happen."""

from __future__ import annotations

from cost_model.configuration.layer_work import LayerWork
from cost_model.configuration.parallelism import ParallelSpec

AMAX_NBYTES = 2.0
"""Bytes read to find the scale of a value: selective checkpointing keeps what was found (aten.max is on its list) and
casts again."""


def cast_nbytes(work: LayerWork, parallel: ParallelSpec) -> tuple[float, float]:
    """Return the bytes that casts to low precision move, forward (inputs, and weights once a step) and backward.

    Of each block the last product is cut over its inputs and the others over their outputs: what those read and what
    that one's gradient arrives as is gathered by tensor parallelism, cast before or after (``gathers_cast``).
    """
    implementation = parallel.implementation
    gathered = 1.0 / parallel.tensor if implementation.gathers_cast and parallel.sequence_parallel else 1.0
    shards = parallel.shard * parallel.context if implementation.shards_cast and parallel.zero == 3 else 1
    inputs = weights = gradients = rescaled = 0.0
    for gemms in (work.attention_gemms, work.mlp_gemms, work.expert_gemms):
        if not gemms:
            continue
        *columns, row = gemms
        joint = implementation.shares_casts and len({gemm.k for gemm in columns}) == 1
        inputs += sum(gathered * gemm.m * gemm.k * gemm.groups for gemm in (columns[:1] if joint else columns))
        inputs += row.m * row.k * row.groups
        gradients += sum(gemm.m * gemm.n * gemm.groups for gemm in columns) + gathered * row.m * row.n * row.groups
        weights += sum(gemm.n * gemm.k * gemm.groups for gemm in gemms)
        rescaled += sum((gemm.m + gemm.n) * gemm.k * gemm.groups for gemm in gemms)
    nbytes = implementation.cast_nbytes
    forward = nbytes * (inputs + weights / parallel.micro_batches / shards)
    return forward, nbytes * gradients + implementation.rescale_nbytes * rescaled
