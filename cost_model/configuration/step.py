"""Seconds of one training step of any parallel configuration, and the parts that they consist of.

    step = m (f + b + loss) + idle (f + b) + exposed all-gathers and reductions of the data axis + slow-down + optimizer

f and b are the seconds of forward and backward of one of the m micro-batches on the slowest pipeline rank, its sends
included. Communication on a stream of its own overlaps with compute and slows it down: each overlapped second costs the
share of the processors that NCCL occupies.

Known error (2026-11, benchmarks/accuracy.py, rows of sources that no constant was fitted to; the structure was chosen
with those rows in sight): dense in 16 bits mean 6 %, 92 % of rows within 15 %, but mean 10 % without the rows of the
one document of which another table is in the fit; in 8 bits mean 9 %; experts mean 15 % and too fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.configuration.data_parallel import data_seconds, layer_rank_parameters
from cost_model.configuration.kernels import Gemm, gemm_s, stream_s
from cost_model.configuration.layer_time import LayerTime, layer_time
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.pipeline_schedules import idle_share
from cost_model.configuration.rank_groups import group_time_s, strided_group
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.compute import stream_bytes_per_s
from cost_model.kernels.in_step import message_share, taken_share
from cost_model.kernels.step_constants import StepConstants, shipped_constants

HOST_MEMORY_BYTES_PER_S = 30e9
"""Bytes per second that one of eight ranks streams through host memory in an optimizer step on the CPU. Assumed: 8 x
DDR5 channels per socket at 60 %, two sockets, eight ranks."""

HOST_LINK_BYTES_PER_S = 25e9
"""Bytes per second over PCIe between device and host under load. Assumed."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by purpose; they add up to ``total_s``.

    Attributes:
        compute_s: kernels of the layers, with recomputation and with the data axis's copies.
        loss_s: vocabulary projection and loss.
        tensor_s, context_s, expert_s: seconds that these parallelisms add.
        pipeline_send_s: exposed sends between pipeline ranks.
        bubble_s: idle time of a pipeline rank.
        data_s: exposed all-gathers of parameters and reductions of gradients.
        slowdown_s: seconds that overlapped communication of the data axis and of the pipeline slows compute.
        optimizer_s: clipping and the optimizer's step.
    """

    compute_s: float
    loss_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    pipeline_send_s: float
    bubble_s: float
    data_s: float
    slowdown_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return float(sum(getattr(self, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The slowest pipeline rank: its numbers of layers without and with experts, and the seconds of one such layer."""

    dense: float
    sparse: float
    dense_time: LayerTime | None
    sparse_time: LayerTime | None

    def sum(self, name: str) -> float:
        """Return the sum of attribute ``name`` over the layers."""
        total = self.dense * getattr(self.dense_time, name) if self.dense_time is not None else 0.0
        if self.sparse_time is not None:
            total += self.sparse * getattr(self.sparse_time, name)
        return float(total)


def step_time(
    spec: TransformerSpec,
    parallel: ParallelSpec,
    cluster: ClusterSpec,
    constants: StepConstants | None = None,
) -> StepTime:
    """Return the seconds of one step, forward to optimizer.

    Raises:
        ValueError: the configuration has more pipeline ranks than the model has layers.
    """
    if parallel.pipeline > spec.layers:
        raise ValueError(f"{parallel.pipeline} pipeline ranks are more than {spec.layers} layers; take fewer ranks")
    constants = constants or shipped_constants()
    spec = spec.on_tensor_ranks(parallel.tensor)
    stage = _slowest_stage(spec, parallel, cluster, constants)
    layer_s = (stage.sum("forward_s") + stage.sum("backward_s")) / (stage.dense + stage.sparse)
    loss = _added_loss_seconds(spec, parallel, layer_s, _loss_seconds(spec, parallel, cluster, constants))
    forward, backward = stage.sum("forward_s"), stage.sum("backward_s")
    send, send_slowdown = _send_seconds(spec, parallel, cluster, forward + backward)
    data = data_seconds(spec, parallel, cluster, constants, (forward, backward))
    count = parallel.micro_batches
    micro_batch = forward + backward + data.copies / count
    return StepTime(
        compute_s=count * (stage.sum("forward_compute_s") + stage.sum("backward_compute_s")) + data.copies,
        loss_s=count * loss,
        tensor_s=count * (stage.sum("forward_tensor_s") + stage.sum("backward_tensor_s")),
        context_s=count * (stage.sum("forward_context_s") + stage.sum("backward_context_s")),
        expert_s=count * (stage.sum("forward_expert_s") + stage.sum("backward_expert_s")),
        pipeline_send_s=count * send,
        bubble_s=idle_share(parallel) * (micro_batch + send),
        data_s=data.exposed,
        slowdown_s=data.overlapped * taken_share(cluster.device) + count * send_slowdown,
        optimizer_s=_optimizer_seconds(spec, parallel, cluster, constants),
    )


def _slowest_stage(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants
) -> _Stage:
    layers = stage_layers(spec, parallel)
    dense, sparse = (layers * kind / spec.layers for kind in (spec.dense_layers, spec.sparse_layers))
    return _Stage(
        dense=dense,
        sparse=sparse,
        dense_time=layer_time(spec, parallel, cluster, constants, sparse=False) if dense else None,
        sparse_time=layer_time(spec, parallel, cluster, constants, sparse=True) if sparse else None,
    )


def stage_layers(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    """Return the number of layers of the fullest pipeline rank.

    If the layers do not divide evenly over all chunks, embedding and loss count as a layer each, as with Megatron's
    ``account_for_embedding_in_pipeline_split`` and ``account_for_loss_in_pipeline_split``.
    """
    chunks = parallel.pipeline * parallel.virtual_stages
    if parallel.pipeline == 1:
        return float(spec.layers)
    if spec.layers % chunks == 0:
        return spec.layers / parallel.pipeline
    return float(-(-(spec.layers + 2) // chunks) * parallel.virtual_stages)


def _added_loss_seconds(spec: TransformerSpec, parallel: ParallelSpec, layer_s: float, loss_s: float) -> float:
    """Return the seconds by which the loss makes the last pipeline rank slower than the fullest one."""
    chunks = parallel.pipeline * parallel.virtual_stages
    if parallel.pipeline == 1 or spec.layers % chunks == 0:
        return loss_s
    return max(0.0, loss_s - layer_s)


def _loss_seconds(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants
) -> float:
    """Return the seconds of vocabulary projection and loss, forward and backward, for one micro-batch.

    One pipeline rank runs them; all others wait for it.
    """
    device, implementation = cluster.device, parallel.implementation
    head = Gemm(parallel.tokens, spec.vocab / parallel.tensor, spec.hidden)
    dtype = "bf16" if parallel.dtype in ("fp8", "fp4") else parallel.dtype
    to_input, to_weight = head.transposed()
    gemms = [head, to_input] + ([] if implementation.lora else [to_weight])
    seconds = sum(gemm_s(gemm, device=device, dtype=dtype, constants=constants) for gemm in gemms)
    nbytes = implementation.loss.traffic_nbytes * head.m * head.n
    if not implementation.lora:
        nbytes += 2 * 4.0 * spec.embedding_parameters / parallel.tensor  # the embedding's dense gradient
    return seconds + stream_s(nbytes, fused=True, device=device, constants=constants)


def _send_seconds(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, micro_batch_s: float
) -> tuple[float, float]:
    """Return the exposed seconds of one micro-batch's sends between pipeline ranks, and the slow-down of compute.

    Sends overlap if the rank has another chunk to run meanwhile (Megatron's overlap_p2p_comm needs interleaving).

    Args:
        micro_batch_s: compute seconds of a rank's chunks for one micro-batch.
    """
    if parallel.pipeline == 1:
        return 0.0, 0.0
    nbytes = 2.0 * parallel.tokens * spec.hidden / parallel.tensor  # sharded, then all-gathered (SC21, section 4.1)
    stride = parallel.tensor * parallel.context * parallel.data
    once = group_time_s("send_recv", nbytes, size=parallel.pipeline, stride=stride, cluster=cluster)
    seconds = 2.0 * once * parallel.virtual_stages
    if not (parallel.implementation.data_parallel.overlaps and parallel.virtual_stages > 1):
        return seconds, 0.0
    nodes = strided_group(parallel.pipeline, stride, cluster.devices_per_node).nodes
    overlapped = min(seconds, micro_batch_s)
    return seconds - overlapped, overlapped * message_share(cluster.device, nodes=nodes)


def _optimizer_seconds(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants
) -> float:
    """Return the seconds of clipping and of the optimizer's step over this rank's shard of the states."""
    state = parallel.implementation.state
    if parallel.implementation.lora:
        return 0.0
    plain, experts = layer_rank_parameters(spec, parallel)
    plain += spec.vocab * spec.hidden / parallel.tensor
    shards = parallel.data * parallel.context if parallel.zero in (1, 2) else 1
    if parallel.zero == 3:
        shards = parallel.parameter_shards
    expert_ranks = parallel.expert * parallel.expert_tensor
    expert_shards = max(1.0, shards * parallel.tensor / expert_ranks) if parallel.zero else 1.0
    numel = plain / shards + experts / expert_shards
    updated = state.master_nbytes + state.optimizer_nbytes + state.parameter_nbytes
    per_value = 2.0 * updated * state.optimizer_passes + 3 * max(state.gradient_nbytes, 2)
    if state.optimizer_on_host:
        return numel * (per_value / HOST_MEMORY_BYTES_PER_S + 4.0 / HOST_LINK_BYTES_PER_S)
    return numel * per_value / (stream_bytes_per_s(cluster.device) * constants.fused_stream_share)
