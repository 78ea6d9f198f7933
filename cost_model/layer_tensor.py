"""Seconds of tensor parallelism in one layer that no product hides."""

from __future__ import annotations

from cost_model.cluster import ClusterSpec
from cost_model.layer_work import LayerWork
from cost_model.parallelism import ParallelSpec
from cost_model.rank_groups import group_time_s
from cost_model.step_constants import StepConstants
from cost_model.step_kernels import Gemm, gemm_s, stream_s
from cost_model.transformer import TransformerSpec


def tensor_seconds(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants, work: LayerWork
) -> tuple[float, float]:
    """Return the exposed seconds of one pass over a layer, forward and backward, attention's and the MLP's.

    With sequence parallelism a gather before and a scattered reduction after each of the two, else an all-reduce
    (Korthikanti et al., arXiv 2205.05198, section 4.2.2). Overlapped, each is cut into as many pieces as there are
    ranks, one of them local (Transformer Engine's userbuffers; torch's async tensor parallelism): a gather hides behind
    the products that read it, of a reduction the last piece is left over, and what is longer than the products beside
    it shows. Backward has two products for each of forward's.
    """
    if parallel.tensor == 1:
        return 0.0, 0.0
    nbytes = 2.0 * parallel.tokens * spec.hidden
    gathered = nbytes / 2 if parallel.implementation.gathers_cast and parallel.dtype == "fp8" else nbytes
    gather = reduce = 0.0
    if parallel.sequence_parallel:
        reduce = group_time_s("reduce_scatter", nbytes, size=parallel.tensor, stride=1, cluster=cluster)
        gather = group_time_s("all_gather", gathered, size=parallel.tensor, stride=1, cluster=cluster)
    else:
        reduce = group_time_s("all_reduce", nbytes, size=parallel.tensor, stride=1, cluster=cluster)
    copies = 2.0 * (nbytes + gathered) if parallel.implementation.tensor_copies else 0.0
    copied = 2.0 * stream_s(copies, fused=True, device=cluster.device, constants=constants)
    if not parallel.implementation.tensor_overlap:
        return 2.0 * (gather + reduce) + copied, 2.0 * (gather + reduce) + copied
    last = reduce / parallel.tensor
    forward = backward = copied
    for gemms in (work.attention_gemms, work.mlp_gemms):
        if len(gemms) == 1:  # a router alone: tokens go to experts cut over the sequence, as they are
            continue
        columns, row = _block_seconds(gemms, parallel, cluster, constants)
        forward += max(0.0, gather - columns) + max(last, reduce - row)
        backward += max(0.0, gather - 2.0 * row) + max(last, reduce - 2.0 * columns)
    return forward, backward


def _block_seconds(
    gemms: tuple[Gemm, ...], parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants
) -> tuple[float, float]:
    """Return the seconds of the products that read what was gathered, and of the one whose result is reduced."""
    seconds = [gemm_s(gemm, device=cluster.device, dtype=parallel.dtype, constants=constants) for gemm in gemms]
    return sum(seconds[:-1]), seconds[-1]
