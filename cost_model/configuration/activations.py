"""Bytes that one transformer layer saves for backward under each checkpointing mode, and bytes that its backward adds.

Saved values are counted op by op. A GEMM saves its input. A norm saves its input, and its result where the next GEMM
does not save the same tensor. Attention saves queries, keys, values, its result and one float32 per row. A gated
activation saves both factors. Sources: Korthikanti et al., arXiv 2205.05198, section 4 (34 s b h bytes per layer, 4 of
them dropout masks, plus 5 a s^2 b for unfused scores); torch's autograd formulas. Known error: see ``memory``.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.configuration.implementation import SavedGemms
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.transformer import TransformerSpec

RING_NBYTES, RING_RANK_NBYTES = 44.0, 4.0
"""Bytes per value of the queries that are live in backward of torch's context parallelism: fixed, and per context rank.

The first counts ten float32 tensors (accumulated gradients of queries, keys and values; the increments of one ring step
to these three; gradients of keys and values as sent and as received) and the 16-bit keys and values as sent. The second
counts the all-gathered 16-bit keys and values of each rank. Source: torch's
distributed/tensor/experimental/_context_parallel/_attention.py, 2.13, ``_templated_ring_attention_backward`` and
``_AllGatherRotater`` (torchtitan's context_parallel_rotate_method is allgather)."""

DENSE_SCORE_NBYTES = 26.0
"""Bytes per score that are live in backward of an uncompiled FlexAttention.

Six float32 tensors (scores, masked scores, softmax, and the gradients of these three) and a 16-bit copy. Source:
``sdpa_dense_backward`` in torch's _higher_order_ops/flex_attention.py, 2.13."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer and micro-batch: saved until backward, and the most that backward or recomputation adds."""

    saved: float
    transient: float


def layer_bytes(spec: TransformerSpec, parallel: ParallelSpec, *, sparse: bool) -> LayerBytes:
    """Return the bytes of a layer with (``sparse``) or without experts on one rank, for one micro-batch."""
    saving = parallel.implementation.saving
    all_bytes = _attention_bytes(spec, parallel) + _mlp_bytes(spec, parallel, sparse=sparse)
    boundary = 2.0 * parallel.tokens * spec.hidden / parallel.sequence_shards
    widest = _mlp_width(spec, parallel, sparse=sparse)
    # Sequence parallelism shards neither the gradient of the result (all-gathered) nor that of the input (not reduced).
    gradients = 2.0 * parallel.tokens * spec.hidden * 2 + 2.0 * 2 * widest
    saved = {
        "none": all_bytes,
        "attention": all_bytes - _scores_bytes(spec, parallel),
        "selective": _selective_mean_bytes(spec, parallel, sparse=sparse),
        "full": boundary + (_attention_result_bytes(spec, parallel) if saving.full_attention else 0.0),
    }[parallel.checkpointing]
    saved = min(saved, all_bytes)
    weights = 0.0
    if parallel.checkpointing == "selective" and not sparse:
        weights = spec.attention_parameters + spec.dense_mlp_parameters
        weights *= saving.selective_weight_nbytes / parallel.tensor
    transient = all_bytes - saved + gradients + _dense_bytes(spec, parallel)
    ring = _ring_bytes(spec, parallel)
    if ring:  # the MLP's tensors are freed by then
        attention = _attention_bytes(spec, parallel) + 2.0 * parallel.tokens * spec.hidden * 2 + ring
        transient = max(transient, attention - saved)
    return LayerBytes(saved=saved + weights, transient=transient)


def _ring_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    if parallel.context == 1 or not parallel.implementation.kernels.torch_ring_attention:
        return 0.0
    values = parallel.tokens * (spec.query_dim + spec.attention_out_dim) / 2 / parallel.tensor
    return (RING_NBYTES + RING_RANK_NBYTES * parallel.context) * values


def _dense_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    if parallel.implementation.kernels.attention != "dense":
        return 0.0
    heads = parallel.micro_batch * spec.heads / parallel.tensor
    return DENSE_SCORE_NBYTES * heads * parallel.seq * parallel.seq / parallel.context


def _attention_result_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    """Return the bytes of attention's result and of one float32 per row."""
    return parallel.tokens * (2.0 * spec.attention_out_dim + 4.0 * spec.heads) / parallel.tensor


def _scores_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    """Return the bytes of scores that unfused attention saves.

    Softmax's 16-bit result has 2 bytes per score; dropout's mask has 1 and its result 2.
    """
    if parallel.implementation.kernels.attention != "unfused":
        return 0.0
    scores = parallel.micro_batch * spec.heads / parallel.tensor * parallel.seq * parallel.seq / parallel.context
    return scores * (5.0 if spec.dropout else 2.0)


def _input_nbytes(parallel: ParallelSpec) -> float:
    """Return the bytes that a GEMM saves per value of its input: 1 where it saves the 8-bit cast, else 2."""
    return 1.0 if parallel.implementation.low_precision.saves_cast_inputs and parallel.low_precision else 2.0


def _norm_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    """Return the bytes that a norm saves: its input, ``norm_nbytes`` per value, and its result unless recomputed."""
    saving, shards = parallel.implementation.saving, parallel.sequence_shards
    residual = parallel.tokens * spec.hidden
    saved = residual * (2.0 + saving.norm_nbytes) / shards
    if saving.recomputes_elementwise:
        return saved
    gathered = parallel.implementation.tensor_parallel.saves_gathered_inputs
    return saved + _input_nbytes(parallel) * residual / (1 if gathered else shards)


def _attention_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    tokens, shards = parallel.tokens, parallel.sequence_shards
    residual = tokens * spec.hidden
    nbytes = _norm_bytes(spec, parallel)
    nbytes += 2.0 * tokens * (spec.query_dim + spec.key_dim + spec.value_dim) / parallel.tensor
    if spec.mla is not None:
        nbytes += 2.0 * tokens * 2 * (spec.mla.query_rank + spec.mla.kv_rank + spec.mla.rope_dim)
        nbytes += 2.0 * tokens * spec.heads * (spec.mla.nope_dim + spec.mla.value_dim) / parallel.tensor
    nbytes += _attention_result_bytes(spec, parallel)
    return nbytes + _scores_bytes(spec, parallel) + (residual / shards if spec.dropout else 0.0)


def _mlp_width(spec: TransformerSpec, parallel: ParallelSpec, *, sparse: bool) -> float:
    """Return the number of values between the MLP's GEMMs on this rank, over all experts of its tokens."""
    if not sparse or spec.experts is None:
        return parallel.tokens * spec.ffn / parallel.tensor
    routed = parallel.tokens * spec.experts.top_k * parallel.expert_tensor / parallel.tensor
    shared = parallel.tokens * spec.experts.shared_ffn / parallel.tensor
    return routed * spec.experts.ffn / parallel.expert_tensor + shared


def _mlp_bytes(spec: TransformerSpec, parallel: ParallelSpec, *, sparse: bool) -> float:
    options, fused = parallel.implementation.experts, parallel.implementation.kernels.fused_ops
    tokens, shards = parallel.tokens, parallel.sequence_shards
    residual = tokens * spec.hidden
    nbytes = _norm_bytes(spec, parallel)
    width = _mlp_width(spec, parallel, sparse=sparse)
    input_count = 2.0 if spec.gated else 1.0  # by the activation
    gate = 1.0 if spec.gated and not fused else 0.0
    nbytes += width * (2.0 * (input_count + gate) + _input_nbytes(parallel))
    if sparse and spec.experts is not None:
        # Tokens sorted by expert, before and after the experts (after: in float32 where a separate kernel weights them,
        # as in torchtitan's moe.py @f738a03bf), and the router's logits and scores.
        routed = tokens * spec.experts.top_k * parallel.expert_tensor / parallel.tensor
        weighted = tokens * spec.experts.top_k if options.float32_combine else routed
        nbytes += (2.0 * routed + (2.0 if fused else 4.0) * weighted) * spec.hidden
        nbytes += options.router_nbytes * residual
        nbytes += 4.0 * tokens * spec.experts.count * 2
    return nbytes + (residual / shards if spec.dropout else 0.0)


def _selective_mean_bytes(spec: TransformerSpec, parallel: ParallelSpec, *, sparse: bool) -> float:
    """Return the bytes that selective checkpointing saves of a layer, averaged over low-precision and other layers."""
    saving = parallel.implementation.saving
    plain = _selective_bytes(spec, parallel, saving.selective_gemms, sparse=sparse)
    if not parallel.low_precision:
        return plain
    cast = _selective_bytes(spec, parallel, saving.selective_cast_gemms, sparse=sparse)
    return plain + parallel.implementation.low_precision.layer_share * (cast - plain)


def _selective_bytes(spec: TransformerSpec, parallel: ParallelSpec, gemms: SavedGemms, *, sparse: bool) -> float:
    """Return the bytes that torchtitan's op policy saves: the block's input, attention's result, results of GEMMs.

    Of the GEMMs q, k, v, o, gate, up and down, the policy "alternate" saves every second result: those of q, v, gate
    and down. Backward reads all of these but down's, since the residual addition after down saves nothing. Eager torch
    saves down's result all the same, unreduced on each tensor rank. Reduce-scattered results are saved too, and results
    of all-to-alls with ``selective_all_to_all``. No version of torchtitan saves the results of the experts' GEMMs.
    """
    saving = parallel.implementation.saving
    tokens, shards = parallel.tokens, parallel.sequence_shards
    unread = tokens * spec.hidden * (1.0 + (1.0 / shards if shards > 1 else 0.0)) if saving.selective_unread else 0.0
    values = tokens * spec.hidden / shards  # the block's input
    values += tokens * spec.hidden / shards if shards > 1 else 0.0  # attention's reduce-scattered result
    values += unread if gemms != "none" else 0.0
    values += _saved_gemm_values(spec, parallel, gemms, sparse=sparse)
    attention = _attention_result_bytes(spec, parallel) if saving.selective_attention else 0.0
    if sparse and saving.selective_all_to_all and parallel.expert > 1 and spec.experts is not None:
        values += 2.0 * tokens * spec.experts.top_k * spec.hidden * parallel.expert_tensor / parallel.tensor
    return 2.0 * values + attention


def _saved_gemm_values(spec: TransformerSpec, parallel: ParallelSpec, gemms: SavedGemms, *, sparse: bool) -> float:
    """Return the number of values in those saved GEMM results that backward reads."""
    if gemms == "none":
        return 0.0
    tokens, tensor = parallel.tokens, parallel.tensor
    width = _mlp_width(spec, parallel, sparse=False)
    if sparse and spec.experts is not None:
        width = tokens * spec.experts.shared_ffn / tensor
    if gemms == "alternate":
        return tokens * _alternate_width(spec, tensor) + width
    values = tokens * (spec.query_dim + spec.value_dim) / tensor + width
    values += width * (spec.mlp_matrices - 2)
    if spec.mla is None:
        values += tokens * spec.key_dim / tensor
    else:  # MLA: the kv GEMM yields keys and values from the kv bottleneck, the result of another GEMM
        values += tokens * spec.heads * spec.mla.nope_dim / tensor
        values += tokens * (spec.mla.query_rank + spec.mla.kv_rank + spec.mla.rope_dim)
    return values + tokens * spec.hidden  # attention's projection, before it is reduced


def _alternate_width(spec: TransformerSpec, tensor: int) -> float:
    """Return the total width of the results of every other projection before attention, on one tensor rank.

    Of q, k, v these are q and v. Multi-head latent attention has the projections q, kv bottleneck, kv (keys and values
    in one): these are q and kv. With a q bottleneck it has q bottleneck, q, kv bottleneck, kv: these are the
    bottlenecks, which tensor parallelism does not split.
    """
    mla = spec.mla
    if mla is None:
        return (spec.query_dim + spec.value_dim) / tensor
    if mla.query_rank:
        return float(mla.query_rank + mla.kv_rank + mla.rope_dim)
    return (spec.query_dim + spec.heads * (mla.nope_dim + mla.value_dim)) / tensor
