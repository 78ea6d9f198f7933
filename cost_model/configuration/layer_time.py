"""Seconds of one layer on one rank for one micro-batch: kernels, and the collectives that compute waits for.

    forward  = max(GEMMs + attention + streams, host launches) + tensor, context and expert collectives
    backward = the same for backward, recomputation of checkpointed ops included

Known error: see ``step``.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.configuration.context_parallel import context_seconds, merge_seconds
from cost_model.configuration.kernels import Gemm, attention_s, gemm_s, stream_s
from cost_model.configuration.layer_work import LayerWork, layer_work
from cost_model.configuration.low_precision_casts import AMAX_NBYTES, cast_nbytes
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.rank_groups import group_time_s, strided_group
from cost_model.configuration.tensor_parallel import tensor_seconds
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.compute import stream_bytes_per_s
from cost_model.kernels.step_constants import StepConstants

BACKWARD_HOST_SHARE = 1.0
"""Host seconds of backward over those of forward. Autograd launches about twice as many kernels, each at half the cost
(no Python). Assumed."""

EXPOSED_EXPERT_SHARE = 0.3
"""Share of the experts' all-to-all that is exposed where it overlaps with another micro-batch's compute. Assumed."""

LORA_FORWARD = 1.05
"""GEMM seconds with adapters of rank 8 to 16, over those without: 2 to 5 % more work. Assumed."""


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Seconds of one layer for one micro-batch, by pass; ``backward_*`` includes recomputation.

    Compute is the kernels of the layer. Tensor, context and expert are the seconds that the collectives of these
    parallelisms add.
    """

    forward_compute_s: float
    forward_tensor_s: float
    forward_context_s: float
    forward_expert_s: float
    backward_compute_s: float
    backward_tensor_s: float
    backward_context_s: float
    backward_expert_s: float

    @property
    def forward_s(self) -> float:
        """Seconds of forward."""
        return self.forward_compute_s + self.forward_tensor_s + self.forward_context_s + self.forward_expert_s

    @property
    def backward_s(self) -> float:
        """Seconds of backward and recomputation."""
        return self.backward_compute_s + self.backward_tensor_s + self.backward_context_s + self.backward_expert_s


def layer_time(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants, *, sparse: bool
) -> LayerTime:
    """Return the seconds of one layer, with (``sparse``) or without experts, on one rank for one micro-batch."""
    kernels, saving = parallel.implementation.kernels, parallel.implementation.saving
    work = layer_work(spec, parallel, sparse=sparse)
    gemm, backward_gemm, selective_gemm = _gemm_seconds(work, parallel, cluster, constants)
    attention = _attention_seconds(spec, parallel, cluster, backward=False)
    backward_attention = _attention_seconds(spec, parallel, cluster, backward=True)
    stream, backward_stream = (
        stream_s(nbytes, fused=kernels.fused_ops, device=cluster.device, constants=constants)
        for nbytes in (work.forward_nbytes, work.backward_nbytes)
    )
    host = constants.host_op_s * (kernels.host_ops_per_layer + (kernels.expert_host_ops if sparse else 0))
    recomputed = {
        "none": 0.0,
        "attention": attention if kernels.attention == "unfused" else 0.0,
        "selective": selective_gemm + stream + (0.0 if saving.selective_attention else attention),
        "full": gemm + attention + stream,
    }[parallel.checkpointing]
    full = 1.0 if parallel.checkpointing == "full" else 0.0
    saves_attention = parallel.checkpointing == "selective" and saving.selective_attention
    attends_again = 1.0 if parallel.checkpointing in ("selective", "full") and not saves_attention else 0.0
    tensor, backward_tensor = tensor_seconds(spec, parallel, cluster, constants, work)
    ring, backward_ring = context_seconds(spec, parallel, cluster, (attention, backward_attention))
    merge, backward_merge = merge_seconds(spec, parallel, cluster, constants)
    exchange = _expert_seconds(spec, parallel, cluster, work)
    recompute_host = host if parallel.checkpointing in ("full", "selective") else 0.0
    return LayerTime(
        forward_compute_s=max(gemm + attention + stream, host),
        forward_tensor_s=tensor,
        forward_context_s=ring + merge,
        forward_expert_s=exchange,
        backward_compute_s=max(
            backward_gemm + backward_attention + backward_stream + recomputed,
            host * BACKWARD_HOST_SHARE + recompute_host,
        ),
        backward_tensor_s=backward_tensor + full * tensor,
        backward_context_s=backward_ring + backward_merge + attends_again * (ring + merge),
        backward_expert_s=exchange * (1.0 + full),
    )


def _gemm_seconds(
    work: LayerWork, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants
) -> tuple[float, float, float]:
    """Return the seconds of GEMMs, casts included: forward, backward, and recomputed by selective checkpointing."""
    dtype, lora = parallel.dtype, parallel.implementation.lora

    def seconds(gemm: Gemm) -> float:
        return gemm_s(gemm, device=cluster.device, dtype=dtype, constants=constants)

    plain = [seconds(gemm) for gemm in work.attention_gemms + work.mlp_gemms]
    experts = sum(seconds(gemm) for gemm in work.expert_gemms) / constants.expert_share
    forward, backward = sum(plain) + experts, 0.0
    for gemms, share in ((work.attention_gemms + work.mlp_gemms, 1.0), (work.expert_gemms, constants.expert_share)):
        for gemm in gemms:
            to_input, to_weight = gemm.transposed()
            backward += (seconds(to_input) + (0.0 if lora else seconds(to_weight))) / share
    if lora:
        forward *= LORA_FORWARD
    recomputed = _recomputed_seconds(parallel, plain) + experts
    if parallel.low_precision:
        cast, backward_cast = cast_nbytes(work, parallel)
        bytes_per_s = stream_bytes_per_s(cluster.device)
        recomputed += cast * (1.0 - AMAX_NBYTES / parallel.implementation.low_precision.cast_nbytes) / bytes_per_s
        forward += cast / bytes_per_s
        backward += backward_cast / bytes_per_s
    return forward, backward, recomputed


def _recomputed_seconds(parallel: ParallelSpec, plain: list[float]) -> float:
    """Return the seconds of the GEMMs that torchtitan's selective checkpointing recomputes, without the experts'.

    Of a layer's calls of mm, it saves every other result, starting with the first, or all, or none. No version saves
    results of the experts' grouped GEMMs, _grouped_mm (activation_checkpoint.py @b5bcd76).
    """
    implementation = parallel.implementation
    seconds = {"none": sum(plain), "alternate": sum(plain[1::2]), "all": 0.0}
    usual = seconds[implementation.saving.selective_gemms]
    if not parallel.low_precision:
        return usual
    cast = seconds[implementation.saving.selective_cast_gemms]
    return usual + implementation.low_precision.layer_share * (cast - usual)


def _attention_seconds(spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, *, backward: bool) -> float:
    """Return the seconds of attention in one pass; with a window, the mean over layers with and without it."""
    seq = min(parallel.document or parallel.seq, parallel.seq)

    def seconds(window: int) -> float:
        whole = attention_s(
            kernel=parallel.implementation.kernels.attention,
            batch=max(1, parallel.micro_batch * parallel.seq // seq),
            heads=spec.heads / parallel.tensor,
            kv_heads=(spec.heads if spec.mla is not None else spec.kv_heads) / parallel.tensor,
            seq=seq,
            head_dim=spec.query_dim // spec.heads,
            value_dim=spec.attention_out_dim // spec.heads,
            causal=spec.causal,
            window=window,
            backward=backward,
            device=cluster.device,
        )
        return whole / parallel.context

    if not spec.window or spec.window >= seq:
        return seconds(0)
    return (seconds(0) + seconds(spec.window)) / 2


def _expert_seconds(spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, work: LayerWork) -> float:
    """Return the exposed seconds of the two all-to-alls of one pass: tokens to their experts, and back."""
    if not work.expert_gemms or parallel.expert == 1:
        return 0.0
    options = parallel.implementation.experts
    nbytes = 2.0 * work.routed_tokens / parallel.expert_tensor * spec.hidden
    if options.sends_once_per_node and spec.experts is not None:
        nbytes *= _distinct_share(spec.experts.top_k, parallel, cluster)
    once = group_time_s("all_to_all", nbytes, size=parallel.expert, stride=parallel.expert_tensor, cluster=cluster)
    if parallel.expert_tensor > 1:
        gathered = nbytes * parallel.expert_tensor
        once += group_time_s("all_gather", gathered, size=parallel.expert_tensor, stride=1, cluster=cluster)
    return 2.0 * once * (EXPOSED_EXPERT_SHARE if options.overlaps_all_to_all else 1.0)


def _distinct_share(top_k: int, parallel: ParallelSpec, cluster: ClusterSpec) -> float:
    """Return the mean share of a token's ``top_k`` copies that are sent if each node (or rank) receives the token once.

    Of ``top_k`` draws among p equally likely nodes (or ranks of the only node), p (1 - (1 - 1/p)^top_k) are distinct.
    """
    group = strided_group(parallel.expert, parallel.expert_tensor, cluster.devices_per_node)
    places = group.nodes if group.nodes > 1 else group.size
    return places * (1.0 - (1.0 - 1.0 / places) ** top_k) / top_k
