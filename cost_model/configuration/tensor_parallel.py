"""Seconds that tensor parallelism adds to one layer: exposed collectives, and the slow-down of overlapped GEMMs.

Sources: Korthikanti et al., arXiv 2205.05198, section 4.2.2 (collectives of sequence parallelism); Transformer Engine's
userbuffers and torch's async tensor parallelism (pieces); Megatron-Core's layers.py,
LinearWithGradAccumulationAndAsyncCommunication (all-gather again in backward). Known error: see ``step``.
"""

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
    """Return the seconds added to one pass over a layer, forward and backward, by attention and MLP together.

    With sequence parallelism, attention and MLP each have an all-gather before and a reduce-scatter after them; without
    it, an all-reduce after them.

    Async tensor parallelism cuts each collective into as many pieces as there are ranks; one piece is local. An
    all-gather overlaps with the GEMMs that read its result. A reduce-scatter overlaps with the GEMM before it, except
    for its last piece. A collective is also exposed for as long as it takes longer than its GEMMs. The overlapped part
    slows the GEMMs.

    Backward has two GEMMs for each forward GEMM, or one if weights are frozen (LoRA). An input that is not saved is
    all-gathered again for the weight's gradient. This all-gather overlaps with the GEMMs of the input's gradient, in
    Megatron also without async tensor parallelism.
    """
    if parallel.tensor == 1:
        return 0.0, 0.0
    implementation = parallel.implementation
    options, lora = implementation.tensor_parallel, implementation.lora
    nbytes = 2.0 * parallel.tokens * spec.hidden
    cast = implementation.low_precision.casts_before_gather and parallel.dtype == "fp8"
    gathered = nbytes / 2 if cast else nbytes
    gather = reduce = 0.0
    if parallel.sequence_parallel:
        reduce = group_time_s("reduce_scatter", nbytes, size=parallel.tensor, stride=1, cluster=cluster)
        gather = group_time_s("all_gather", gathered, size=parallel.tensor, stride=1, cluster=cluster)
    else:
        reduce = group_time_s("all_reduce", nbytes, size=parallel.tensor, stride=1, cluster=cluster)
    copies = 2.0 * (nbytes + gathered) if options.copies else 0.0
    copied = 2.0 * stream_s(copies, fused=True, device=cluster.device, constants=constants)
    gradients = 1.0 if lora else 2.0
    reallgather = parallel.sequence_parallel and not options.saves_gathered_inputs and not lora
    forward = backward = copied if options.async_tp else 2.0 * (gather + reduce) + copied
    for gemms in (work.attention_gemms, work.mlp_gemms):
        if len(gemms) == 1:  # a router only: the all-to-all sends tokens as sequence parallelism shards them
            continue
        columns, row = _block_seconds(gemms, parallel, cluster, constants)
        if reallgather:
            backward += _overlapped_s(gather, max(0.0, gather - columns), cluster)
        if options.async_tp:
            forward += _async_s(gather, reduce, columns, row, parallel, cluster)
            remaining = columns if reallgather else gradients * columns
            backward += _async_s(gather, reduce, gradients * row, remaining, parallel, cluster)
    return forward, backward


def _async_s(
    gather: float, reduce: float, readers: float, writers: float, parallel: ParallelSpec, cluster: ClusterSpec
) -> float:
    """Return the seconds that an all-gather and a reduce-scatter add, overlapped with GEMMs; all arguments in seconds.

    Args:
        gather, reduce: of the all-gather and of the reduce-scatter alone.
        readers, writers: of the GEMMs that read the all-gather's result, and of those before the reduce-scatter.
        parallel: the configuration.
        cluster: the cluster.
    """
    exposed = max(0.0, gather - readers) + max(reduce / parallel.tensor, reduce - writers)
    return _overlapped_s(gather + reduce, exposed, cluster)


def _overlapped_s(seconds: float, exposed: float, cluster: ClusterSpec) -> float:
    """Return the seconds that a communication of ``seconds`` adds, of which ``exposed`` do not overlap with GEMMs.

    The overlapped part slows the GEMMs by the share of the processors that NCCL occupies.
    """
    return exposed + taken_share(cluster.device) * (seconds - exposed)


def _block_seconds(
    gemms: tuple[Gemm, ...], parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants
) -> tuple[float, float]:
    """Return the seconds of the GEMMs that read the all-gathered input, and of the one whose result is reduced."""
    seconds = [gemm_s(gemm, device=cluster.device, dtype=parallel.dtype, constants=constants) for gemm in gemms]
    return sum(seconds[:-1]), seconds[-1]
