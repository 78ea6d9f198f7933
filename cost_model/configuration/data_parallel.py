"""Seconds of the data axis in a training step: all-gathers of parameters and reductions of gradients.

ZeRO-3 all-gathers each layer's parameters and reduce-scatters its gradients. Both overlap with the compute of one
layer, except the first all-gather and the last reduction. Without ZeRO-3, gradients are reduced once a step (or once a
micro-batch), overlapped with backward, and updated parameters are all-gathered, overlapped with forward. Source:
FSDP2's and Megatron's code. Known error: see ``step``.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.configuration.kernels import stream_s
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.rank_groups import group_time_s
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.step_constants import StepConstants


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSeconds:
    """Seconds of the data axis per step: exposed, overlapped with compute, and of copies on the compute stream."""

    exposed: float = 0.0
    overlapped: float = 0.0
    copies: float = 0.0


def data_seconds(
    spec: TransformerSpec,
    parallel: ParallelSpec,
    cluster: ClusterSpec,
    constants: StepConstants,
    passes: tuple[float, float],
) -> DataSeconds:
    """Return the seconds of the data axis in one step.

    Args:
        passes: seconds of a pipeline rank's forward and backward of one micro-batch, which collectives overlap with.
    """
    if parallel.zero == 3:
        return _sharded_seconds(spec, parallel, cluster, constants, passes)
    return _replicated_seconds(spec, parallel, cluster, passes)


def layer_rank_parameters(spec: TransformerSpec, parallel: ParallelSpec) -> tuple[float, float]:
    """Return the parameters of one pipeline rank's layers on one tensor rank: without routed experts, and of these.

    The counts are not divided by the data axis.
    """
    plain = spec.layers * (spec.attention_parameters + spec.norm_parameters)
    plain += spec.dense_layers * spec.dense_mlp_parameters + spec.sparse_layers * spec.shared_mlp_parameters
    experts = spec.sparse_layers * spec.expert_parameters
    return (
        plain / parallel.tensor / parallel.pipeline,
        experts / (parallel.expert * parallel.expert_tensor) / parallel.pipeline,
    )


def _sharded_seconds(
    spec: TransformerSpec,
    parallel: ParallelSpec,
    cluster: ClusterSpec,
    constants: StepConstants,
    passes: tuple[float, float],
) -> DataSeconds:
    """Return the seconds of ZeRO-3: an all-gather per layer and pass that needs one, and reductions of gradients."""
    options, lora = parallel.implementation.data_parallel, parallel.implementation.lora
    plain, experts = layer_rank_parameters(spec, parallel)
    layers = max(1.0, spec.layers / parallel.pipeline)
    gather, reduce = _layer_collectives(parallel, cluster, plain / layers, experts / layers, linears=True)
    head = spec.vocab * spec.hidden / parallel.tensor * (1 if spec.tied else 2)
    head_gather, head_reduce = _layer_collectives(parallel, cluster, head, 0.0)
    forward, backward = (seconds / layers for seconds in passes)
    if lora:
        reduce = head_reduce = 0.0
    again = gather if options.reshard_after_forward else 0.0
    if parallel.checkpointing == "full" and (plain + experts) / layers > options.max_reuse_numel:
        again += gather  # parameters are freed between recomputation and backward
    overlap = 1.0 if options.overlaps else 0.0

    def one_pass(reduce: float, head_reduce: float) -> tuple[float, float]:
        """Return the exposed and the overlapped seconds of one micro-batch."""
        in_backward = again + reduce if options.prefetches_backward else reduce
        forward_overlap, backward_overlap = overlap * min(gather, forward), overlap * min(in_backward, backward)
        exposed = layers * (gather - forward_overlap + again + reduce - backward_overlap)
        exposed += gather + reduce + head_gather / 2  # the first all-gather and the last reduction overlap with nothing
        return exposed, layers * (forward_overlap + backward_overlap) + head_gather + head_reduce

    times = parallel.micro_batches if options.reduces_each_micro_batch or options.reshard_after_forward else 1
    exposed, overlapped = one_pass(reduce, head_reduce)
    if options.defers_reduction:
        without_reduction = one_pass(0.0, 0.0)
        exposed, overlapped = (
            (last + (times - 1) * one) / times
            for last, one in zip((exposed, overlapped), without_reduction, strict=True)
        )
    copy_s = 0.0
    if parallel.parameter_shards > 1:
        numel = plain + experts + head
        copies = numel * (2 * 4.0 + (0.0 if lora else 2.0 + 2.0 * options.reduce_nbytes))
        copy_s = stream_s(copies, fused=True, device=cluster.device, constants=constants)
    return DataSeconds(exposed=times * exposed, overlapped=times * overlapped, copies=times * copy_s)


def _layer_collectives(
    parallel: ParallelSpec, cluster: ClusterSpec, plain: float, experts: float, *, linears: bool = False
) -> tuple[float, float]:
    """Return the seconds to all-gather one layer's parameters, and to reduce its gradients over shards and replicas.

    Args:
        plain: parameters of the layer on one tensor rank, without routed experts.
        experts: parameters of the layer's routed experts on one expert rank.
        linears: whether the parameters are those of linears, which may be all-gathered in 8 bits.
    """
    implementation = parallel.implementation
    inner, size = parallel.tensor, parallel.parameter_shards
    reduce_nbytes = implementation.data_parallel.reduce_nbytes
    pieces = implementation.data_parallel.collectives_per_layer
    piece = plain / pieces
    cast = linears and implementation.low_precision.casts_shards and parallel.dtype == "fp8"
    gathered = (1.0 if cast else 2.0) * piece
    gather = pieces * group_time_s("all_gather", gathered, size=size, stride=inner, cluster=cluster)
    reduce = pieces * group_time_s("reduce_scatter", reduce_nbytes * piece, size=size, stride=inner, cluster=cluster)
    reduce += group_time_s(
        "all_reduce", reduce_nbytes * plain / size, size=parallel.replicate, stride=inner * size, cluster=cluster
    )
    if experts:
        stride = parallel.expert * parallel.expert_tensor
        expert_size = max(1, size * inner // stride)
        gather += group_time_s("all_gather", 2.0 * experts, size=expert_size, stride=stride, cluster=cluster)
        reduce += group_time_s(
            "reduce_scatter", reduce_nbytes * experts, size=expert_size, stride=stride, cluster=cluster
        )
    return gather, reduce


def _replicated_seconds(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, passes: tuple[float, float]
) -> DataSeconds:
    """Return the seconds without ZeRO-3: of reducing gradients, and with ZeRO-1 or 2 of all-gathering parameters."""
    options = parallel.implementation.data_parallel
    if parallel.implementation.lora:
        return DataSeconds()
    plain, experts = layer_rank_parameters(spec, parallel)
    plain += spec.vocab * spec.hidden / parallel.tensor  # embedding on the first pipeline rank, projection on the last
    size = parallel.data * parallel.context
    reduce, gather = _step_collectives(parallel, cluster, plain, size, parallel.tensor)
    if experts:
        stride = parallel.expert * parallel.expert_tensor
        more = _step_collectives(parallel, cluster, experts, max(1, size * parallel.tensor // stride), stride)
        reduce, gather = reduce + more[0], gather + more[1]
    times = parallel.micro_batches if options.reduces_each_micro_batch else 1
    if not options.overlaps:
        return DataSeconds(exposed=times * reduce + gather)
    layers = max(1.0, spec.layers / parallel.pipeline)
    reduce_overlap = min(reduce * (1 - 1 / layers), passes[1])
    gather_overlap = min(gather * (1 - 1 / layers), passes[0])
    exposed = times * (reduce - reduce_overlap) + gather - gather_overlap
    return DataSeconds(exposed=exposed, overlapped=times * reduce_overlap + gather_overlap)


def _step_collectives(
    parallel: ParallelSpec, cluster: ClusterSpec, numel: float, size: int, stride: int
) -> tuple[float, float]:
    """Return the seconds to reduce the gradients and to all-gather the parameters of ``numel`` parameters."""
    nbytes = parallel.implementation.data_parallel.reduce_nbytes * numel
    if parallel.zero == 0:
        return group_time_s("all_reduce", nbytes, size=size, stride=stride, cluster=cluster), 0.0
    reduce = group_time_s("reduce_scatter", nbytes, size=size, stride=stride, cluster=cluster)
    return reduce, group_time_s("all_gather", 2.0 * numel, size=size, stride=stride, cluster=cluster)
