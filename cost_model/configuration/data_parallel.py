"""Seconds of the data axis in a training step: parameters gathered, gradients reduced, hidden behind compute or not."""

from __future__ import annotations

from cost_model.configuration.kernels import stream_s
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.rank_groups import group_time_s
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.step_constants import StepConstants


def data_seconds(
    spec: TransformerSpec,
    parallel: ParallelSpec,
    cluster: ClusterSpec,
    fitted: StepConstants,
    passes: tuple[float, float],
) -> tuple[float, float, float]:
    """Return, per step, seconds exposed, hidden, and of copies on the compute stream, of the data axis.

    ``passes``: the seconds of a pipeline rank's forward and backward of one micro-batch, to hide collectives behind.
    """
    if parallel.zero == 3:
        return _sharded_seconds(spec, parallel, cluster, fitted, passes)
    return _replicated_seconds(spec, parallel, cluster, passes)


def layer_rank_parameters(spec: TransformerSpec, parallel: ParallelSpec) -> tuple[float, float]:
    """Return the parameters that one pipeline rank's layers have on one tensor rank, without and of routed experts.

    Nothing is divided by the data axis.
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
    fitted: StepConstants,
    passes: tuple[float, float],
) -> tuple[float, float, float]:
    """Return exposed, hidden and copy seconds of ZeRO-3: two gathers and a scattered reduction of every layer."""
    implementation = parallel.implementation
    plain, experts = layer_rank_parameters(spec, parallel)
    layers = max(1.0, spec.layers / parallel.pipeline)
    gather, reduce = _layer_collectives(parallel, cluster, plain / layers, experts / layers, cast=True)
    head = spec.vocab * spec.hidden / parallel.tensor
    head_gather, head_reduce = _layer_collectives(parallel, cluster, head * (1 if spec.tied else 2), 0.0)
    forward, backward = (seconds / layers for seconds in passes)
    if implementation.lora:
        reduce = head_reduce = 0.0
    again = gather if implementation.reshards else 0.0
    if parallel.checkpointing == "full" and (plain + experts) / layers > implementation.reuse_numel:
        again += gather  # dropped between recomputation and backward
    overlap = 1.0 if implementation.data_overlap else 0.0

    def one_pass(reduce: float, head_reduce: float) -> tuple[float, float]:
        beside = again + reduce if implementation.backward_gather_hidden else reduce
        forward_hidden, backward_hidden = overlap * min(gather, forward), overlap * min(beside, backward)
        exposed = layers * (gather - forward_hidden + again + reduce - backward_hidden)
        exposed += gather + reduce + head_gather / 2  # the first gather and last reduction have nothing beside them
        return exposed, layers * (forward_hidden + backward_hidden) + head_gather + head_reduce

    times = parallel.micro_batches if implementation.reduce_each_micro_batch or implementation.reshards else 1
    exposed, hidden = one_pass(reduce, head_reduce)
    if implementation.defers_reduce:
        before = one_pass(0.0, 0.0)
        exposed, hidden = (
            (last + (times - 1) * one) / times for last, one in zip((exposed, hidden), before, strict=True)
        )
    numel = plain + experts + head * (1 if spec.tied else 2)
    copies = numel * (2 * 4.0 + (0.0 if implementation.lora else 2.0 + 2.0 * implementation.reduce_nbytes))
    extra = (
        stream_s(copies, fused=True, device=cluster.device, constants=fitted)
        if parallel.shard * parallel.context > 1
        else 0.0
    )
    return times * exposed, times * hidden, times * extra


def _layer_collectives(
    parallel: ParallelSpec, cluster: ClusterSpec, plain: float, experts: float, *, cast: bool = False
) -> tuple[float, float]:
    """Return the seconds of gathering, and of reducing, one layer's parameters over its shards (and replicas).

    ``cast``: whether they are of linears, which may be gathered in 8 bits.
    """
    inner = parallel.tensor
    size = parallel.shard * parallel.context
    reduce_nbytes = parallel.implementation.reduce_nbytes
    pieces = parallel.implementation.gather_pieces
    piece = plain / pieces
    gathered = (1.0 if cast and parallel.implementation.shards_cast and parallel.dtype == "fp8" else 2.0) * piece
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
) -> tuple[float, float, float]:
    """Return exposed, hidden and copy seconds of reducing gradients once a step (and gathering updated parameters)."""
    implementation = parallel.implementation
    if implementation.lora:
        return 0.0, 0.0, 0.0
    plain, experts = layer_rank_parameters(spec, parallel)
    plain += spec.vocab * spec.hidden / parallel.tensor  # embedding on the first rank, projection on the last
    size = parallel.data * parallel.context
    reduce, gather = _step_collectives(parallel, cluster, plain, size, parallel.tensor)
    if experts:
        stride = parallel.expert * parallel.expert_tensor
        more = _step_collectives(parallel, cluster, experts, max(1, size * parallel.tensor // stride), stride)
        reduce, gather = reduce + more[0], gather + more[1]
    times = parallel.micro_batches if implementation.reduce_each_micro_batch else 1
    if not implementation.data_overlap:
        return times * reduce + gather, 0.0, 0.0
    layers = max(1.0, spec.layers / parallel.pipeline)
    hidden_reduce = min(reduce * (1 - 1 / layers), passes[1])
    hidden_gather = min(gather * (1 - 1 / layers), passes[0])
    exposed = times * (reduce - hidden_reduce) + gather - hidden_gather
    return exposed, times * hidden_reduce + hidden_gather, 0.0


def _step_collectives(
    parallel: ParallelSpec, cluster: ClusterSpec, numel: float, size: int, stride: int
) -> tuple[float, float]:
    """Return the seconds of reducing gradients and of gathering parameters of ``numel`` values over a data group."""
    nbytes = parallel.implementation.reduce_nbytes * numel
    if parallel.zero == 0:
        return group_time_s("all_reduce", nbytes, size=size, stride=stride, cluster=cluster), 0.0
    reduce = group_time_s("reduce_scatter", nbytes, size=size, stride=stride, cluster=cluster)
    return reduce, group_time_s("all_gather", 2.0 * numel, size=size, stride=stride, cluster=cluster)
