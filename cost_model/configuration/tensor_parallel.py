"""Seconds that tensor parallelism adds to one layer: what no product hides, and by how much the rest slows them."""

from __future__ import annotations

from cost_model.configuration.kernels import Gemm, gemm_s, stream_s
from cost_model.configuration.layer_work import LayerWork
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.rank_groups import group_time_s
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.in_step import taken_share
from cost_model.kernels.step_constants import StepConstants


def tensor_seconds(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants, work: LayerWork
) -> tuple[float, float]:
    """Return the exposed seconds of one pass over a layer, forward and backward, attention's and the MLP's.

    With sequence parallelism a gather before and a scattered reduction after each of the two, else an all-reduce
    (Korthikanti et al., arXiv 2205.05198, section 4.2.2). Overlapped, each is cut into as many pieces as there are
    ranks, one of them local (Transformer Engine's userbuffers; torch's async tensor parallelism): a gather hides behind
    the products that read it, of a reduction the last piece is left over, and what is longer than the products beside
    it shows; what hides slows them. Backward has two products for each of forward's, one where weights are frozen
    (LoRA). What was gathered and not kept for the gradient of a weight is gathered again there, beside the products of
    its own gradient, overlapped or not (Megatron-Core's layers.py, LinearWithGradAccumulationAndAsyncCommunication).
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
    implementation = parallel.implementation
    products = 1.0 if implementation.lora else 2.0
    again = parallel.sequence_parallel and not implementation.keeps_gathered and not implementation.lora
    overlapped = implementation.tensor_overlap
    forward = backward = copied if overlapped else 2.0 * (gather + reduce) + copied
    for gemms in (work.attention_gemms, work.mlp_gemms):
        if len(gemms) == 1:  # a router alone: tokens go to experts cut over the sequence, as they are
            continue
        columns, row = _block_seconds(gemms, parallel, cluster, constants)
        if again:
            backward += _beside_s(gather, max(0.0, gather - columns), cluster)
        if overlapped:
            forward += _overlapped_s(gather, reduce, columns, row, parallel, cluster)
            left = columns if again else products * columns
            backward += _overlapped_s(gather, reduce, products * row, left, parallel, cluster)
    return forward, backward


def _overlapped_s(
    gather: float, reduce: float, readers: float, makers: float, parallel: ParallelSpec, cluster: ClusterSpec
) -> float:
    """Return what a gather beside the products that read it, and a reduction beside those that make it, add to them."""
    shown = max(0.0, gather - readers) + max(reduce / parallel.tensor, reduce - makers)
    return _beside_s(gather + reduce, shown, cluster)


def _beside_s(seconds: float, shown: float, cluster: ClusterSpec) -> float:
    """Return what communication adds to the products beside it, of which ``shown`` seconds show.

    What is hidden slows the products by the processors that it takes, as all communication beside computing does.
    """
    return shown + taken_share(cluster.device) * (seconds - shown)


def _block_seconds(
    gemms: tuple[Gemm, ...], parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants
) -> tuple[float, float]:
    """Return the seconds of the products that read what was gathered, and of the one whose result is reduced."""
    seconds = [gemm_s(gemm, device=cluster.device, dtype=parallel.dtype, constants=constants) for gemm in gemms]
    return sum(seconds[:-1]), seconds[-1]
