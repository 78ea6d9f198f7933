"""Seconds of one layer on one rank and micro-batch: kernels, and the collectives that its own compute waits for."""

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
"""Autograd launches about as many kernels as forward has ops, times two, at half the cost each (no Python)."""

EXPOSED_EXPERT_SHARE = 0.3
"""Share of the experts' all-to-all that is exposed where another micro-batch computes beside it. Assumed."""


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """One layer's seconds: what the device computes and what waits for other ranks, by phase.

    ``backward_*`` includes what is recomputed.
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
        """Forward, alone."""
        return self.forward_compute_s + self.forward_tensor_s + self.forward_context_s + self.forward_expert_s

    @property
    def backward_s(self) -> float:
        """Backward and recomputation, alone."""
        return self.backward_compute_s + self.backward_tensor_s + self.backward_context_s + self.backward_expert_s


def layer_time(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants, *, sparse: bool
) -> LayerTime:
    """Return the seconds of one layer with (``sparse``) or without experts."""
    work = layer_work(spec, parallel, sparse=sparse)
    forward_gemm, backward_gemm, again_gemm = _gemm_seconds(work, parallel, cluster, constants)
    attend = _attention_seconds(spec, parallel, cluster, backward=False)
    attend_back = _attention_seconds(spec, parallel, cluster, backward=True)
    stream = stream_s(
        work.forward_nbytes, fused=parallel.implementation.fused, device=cluster.device, constants=constants
    )
    stream_back = stream_s(
        work.backward_nbytes, fused=parallel.implementation.fused, device=cluster.device, constants=constants
    )
    implementation = parallel.implementation
    host = constants.host_op_s * (implementation.host_ops_per_layer + (implementation.expert_host_ops if sparse else 0))
    again = {
        "none": 0.0,
        "attention": attend if implementation.attention == "unfused" else 0.0,
        "selective": again_gemm + stream + (0.0 if implementation.keeps_attention else attend),
        "full": forward_gemm + attend + stream,
    }[parallel.checkpointing]
    recomputed = 1.0 if parallel.checkpointing == "full" else 0.0
    keeps = parallel.checkpointing == "selective" and implementation.keeps_attention
    attends_again = 1.0 if parallel.checkpointing in ("selective", "full") and not keeps else 0.0
    tensor, tensor_back = tensor_seconds(spec, parallel, cluster, constants, work)
    ring, ring_back = context_seconds(spec, parallel, cluster, (attend, attend_back))
    merge, merge_back = merge_seconds(spec, parallel, cluster, constants)
    routed = _expert_seconds(spec, parallel, cluster, work)
    host_again = host if parallel.checkpointing in ("full", "selective") else 0.0
    return LayerTime(
        forward_compute_s=max(forward_gemm + attend + stream, host),
        forward_tensor_s=tensor,
        forward_context_s=ring + merge,
        forward_expert_s=routed,
        backward_compute_s=max(
            backward_gemm + attend_back + stream_back + again, host * BACKWARD_HOST_SHARE + host_again
        ),
        backward_tensor_s=tensor_back + recomputed * tensor,
        backward_context_s=ring_back + merge_back + attends_again * (ring + merge),
        backward_expert_s=routed * (1.0 + recomputed),
    )


def _gemm_seconds(
    work: LayerWork, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants
) -> tuple[float, float, float]:
    """Return the seconds of all products forward, backward, and of those that selective checkpointing repeats."""
    dtype = parallel.dtype

    def seconds(gemm: Gemm) -> float:
        return gemm_s(gemm, device=cluster.device, dtype=dtype, constants=constants)

    plain = [seconds(gemm) for gemm in work.attention_gemms + work.mlp_gemms]
    experts = sum(seconds(gemm) for gemm in work.expert_gemms) / constants.expert_share
    forward, backward = sum(plain) + experts, 0.0
    for gemms, share in ((work.attention_gemms + work.mlp_gemms, 1.0), (work.expert_gemms, constants.expert_share)):
        for gemm in gemms:
            to_input, to_weight = gemm.transposed()
            backward += (seconds(to_input) + (0.0 if parallel.implementation.lora else seconds(to_weight))) / share
    if parallel.implementation.lora:
        forward *= LORA_FORWARD
    again = _repeated_seconds(parallel, plain) + experts
    if dtype in ("fp8", "fp4"):
        cast, cast_back = cast_nbytes(work, parallel)
        again += cast * (1.0 - AMAX_NBYTES / parallel.implementation.cast_nbytes) / stream_bytes_per_s(cluster.device)
        forward += cast / stream_bytes_per_s(cluster.device)
        backward += cast_back / stream_bytes_per_s(cluster.device)
    return forward, backward, again


def _repeated_seconds(parallel: ParallelSpec, plain: list[float]) -> float:
    """Return the seconds of the products that selective checkpointing as in torchtitan repeats, those of experts aside.

    Of a layer's calls of mm every other result is kept, the first among them, unless all or none are; products of
    experts (_grouped_mm) are on no version's list (activation_checkpoint.py @b5bcd76).
    """
    implementation = parallel.implementation
    seconds = {"none": sum(plain), "alternate": sum(plain[1::2]), "all": 0.0}
    usual = seconds[implementation.kept_products]
    if parallel.dtype not in ("fp8", "fp4"):
        return usual
    return usual + implementation.cast_share * (seconds[implementation.cast_kept_products] - usual)


LORA_FORWARD = 1.05
"""Adapters of rank 8 to 16 beside each linear: 2 to 5 % more work. Assumed."""


def _attention_seconds(spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, *, backward: bool) -> float:
    seq = min(parallel.document or parallel.seq, parallel.seq)

    def seconds(window: int) -> float:
        whole = attention_s(
            kernel=parallel.implementation.attention,
            batch=max(1, parallel.micro_batch * parallel.seq // seq),
            heads=spec.heads / parallel.tensor,
            kv_heads=(spec.heads if spec.latent is not None else spec.kv_heads) / parallel.tensor,
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
    nbytes = 2.0 * work.routed_tokens / parallel.expert_tensor * spec.hidden
    if parallel.implementation.expert_once and spec.experts is not None:
        nbytes *= _distinct_share(spec.experts.top_k, parallel, cluster)
    once = group_time_s("all_to_all", nbytes, size=parallel.expert, stride=parallel.expert_tensor, cluster=cluster)
    if parallel.expert_tensor > 1:
        gathered = nbytes * parallel.expert_tensor
        once += group_time_s("all_gather", gathered, size=parallel.expert_tensor, stride=1, cluster=cluster)
    return 2.0 * once * (EXPOSED_EXPERT_SHARE if parallel.implementation.expert_overlap else 1.0)


def _distinct_share(top_k: int, parallel: ParallelSpec, cluster: ClusterSpec) -> float:
    """Return the share of a token's copies that leave where it goes once to each node (or rank), on average.

    ``places`` equally likely places, ``top_k`` draws: places (1 - (1 - 1/places)^top_k) of them are distinct.
    """
    group = strided_group(parallel.expert, parallel.expert_tensor, cluster.devices_per_node)
    places = group.nodes if group.nodes > 1 else group.size
    return places * (1.0 - (1.0 - 1.0 / places) ** top_k) / top_k
