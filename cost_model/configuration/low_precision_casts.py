"""Bytes that the casts of a layer's linears to 8 or 4 bits move, with shared casts and casts before all-gathers.

Source: the frameworks' code, as ``implementation.LowPrecisionOptions`` states it; nothing is fitted. Known error: the
fp8 rows of the accuracy table (benchmarks/results/accuracy.md) include it.
"""

from __future__ import annotations

from cost_model.configuration.layer_work import LayerWork
from cost_model.configuration.parallelism import ParallelSpec

AMAX_NBYTES = 2.0
"""Bytes read per value to find the scale. Selective checkpointing saves the scale (aten.max is on its list), so
recomputation casts without this read."""


def cast_nbytes(work: LayerWork, parallel: ParallelSpec) -> tuple[float, float]:
    """Return the bytes that casts to low precision move for one micro-batch, forward and backward.

    Forward casts inputs, and weights once a step. Backward casts gradients of outputs, and may rescale results. In each
    block the last GEMM is row-wise parallel and the others are column-wise parallel. Tensor parallelism all-gathers the
    inputs of column-wise GEMMs and the output's gradient of row-wise ones, after the cast (``casts_before_gather``) or
    before it.
    """
    options = parallel.implementation.low_precision
    gathered = 1.0 / parallel.tensor if options.casts_before_gather and parallel.sequence_parallel else 1.0
    shards = parallel.parameter_shards if options.casts_shards and parallel.zero == 3 else 1
    inputs = weights = gradients = rescaled = 0.0
    for gemms in (work.attention_gemms, work.mlp_gemms, work.expert_gemms):
        if not gemms:
            continue
        *columns, row = gemms
        one_cast = options.shares_casts and len({gemm.k for gemm in columns}) == 1
        inputs += sum(gathered * gemm.m * gemm.k * gemm.groups for gemm in (columns[:1] if one_cast else columns))
        inputs += row.m * row.k * row.groups
        gradients += sum(gemm.m * gemm.n * gemm.groups for gemm in columns) + gathered * row.m * row.n * row.groups
        weights += sum(gemm.n * gemm.k * gemm.groups for gemm in gemms)
        rescaled += sum((gemm.m + gemm.n) * gemm.k * gemm.groups for gemm in gemms)
    nbytes = options.cast_nbytes
    forward = nbytes * (inputs + weights / parallel.micro_batches / shards)
    return forward, nbytes * gradients + options.rescale_nbytes * rescaled
