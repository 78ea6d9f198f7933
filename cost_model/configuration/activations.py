"""Bytes that autograd keeps of one transformer layer for its backward, by checkpointing, and what backward adds for a
while.

Counted value by value from the ops: a matrix product keeps its input, a norm its input (and its result where the
product after it does not keep the same), attention its queries, keys, values, result and one float32 per row, a gated
activation both factors. Sources: Korthikanti et al., arXiv 2205.05198, section 4 (34 s b h a layer, of which dropout
masks 4, plus 5 a s^2 b for scores that are not fused); torch's autograd formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.configuration.parallelism import KeptProducts, ParallelSpec
from cost_model.configuration.transformer import TransformerSpec


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """One layer and micro-batch: kept until backward, and the most that its backward (or recomputation) adds."""

    saved: float
    transient: float


def layer_bytes(spec: TransformerSpec, parallel: ParallelSpec, *, sparse: bool) -> LayerBytes:
    """Return the bytes of a layer with (``sparse``) or without experts on one rank, for one micro-batch."""
    everything = _attention_bytes(spec, parallel) + _mlp_bytes(spec, parallel, sparse=sparse)
    boundary = 2.0 * parallel.tokens * spec.hidden / _sequence_shards(parallel)
    widest = _mlp_width(spec, parallel, sparse=sparse)
    # Of the result, gathered where the sequence is cut, and of the input, not yet reduced: whole either way.
    gradients = 2.0 * parallel.tokens * spec.hidden * 2 + 2.0 * 2 * widest
    kept = {
        "none": everything,
        "attention": everything - _scores_bytes(spec, parallel),
        "selective": _selective_mean_bytes(spec, parallel, sparse=sparse),
        "full": boundary
        + (_attention_result_bytes(spec, parallel) if parallel.implementation.full_keeps_attention else 0.0),
    }[parallel.checkpointing]
    kept = min(kept, everything)
    weights = 0.0
    if parallel.checkpointing == "selective" and not sparse:
        weights = spec.attention_parameters + spec.dense_mlp_parameters
        weights *= parallel.implementation.kept_weight_nbytes / parallel.tensor
    transient = everything - kept + gradients + _dense_bytes(spec, parallel)
    ring = _ring_bytes(spec, parallel)
    if ring:  # the MLP's bytes are gone by then
        attention = _attention_bytes(spec, parallel) + 2.0 * parallel.tokens * spec.hidden * 2 + ring
        transient = max(transient, attention - kept)
    return LayerBytes(saved=kept + weights, transient=transient)


RING_NBYTES, RING_RANK_NBYTES = 44.0, 4.0
"""Bytes per value of the queries that backward of torch's own context parallelism holds at once: ten float32 tensors
(sums of the gradients of queries, keys and values, what one step adds to them, and gradients of keys and values as they
are sent and as they were received), keys and values in 16 bits as they are sent; and of every rank as they are gathered
(torch's distributed/tensor/experimental/_context_parallel/_attention.py, _templated_ring_attention_backward and
_AllGatherRotater, 2.13; torchtitan's context_parallel_rotate_method is allgather)."""


def _ring_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    if parallel.context == 1 or not parallel.implementation.context_merges:
        return 0.0
    values = parallel.tokens * (spec.query_dim + spec.attention_out_dim) / 2 / parallel.tensor
    return (RING_NBYTES + RING_RANK_NBYTES * parallel.context) * values


DENSE_SCORE_NBYTES = 26.0
"""Bytes per score that backward of an uncompiled FlexAttention holds at once, as names of one Python function: in
float32 scores, masked ones, their softmax, its gradient, that of masked ones, that of scores, and the last in 16 bits
(torch's _higher_order_ops/flex_attention.py, sdpa_dense_backward, 2.13)."""


def _dense_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    if parallel.implementation.attention != "dense":
        return 0.0
    heads = parallel.micro_batch * spec.heads / parallel.tensor
    return DENSE_SCORE_NBYTES * heads * parallel.seq * parallel.seq / parallel.context


def _attention_result_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    """Return the bytes of what attention returns: its result and one float32 per row."""
    return parallel.tokens * (2.0 * spec.attention_out_dim + 4.0 * spec.heads) / parallel.tensor


def _sequence_shards(parallel: ParallelSpec) -> int:
    return parallel.tensor if parallel.sequence_parallel else 1


def _scores_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    """Return what an attention that is not fused keeps of its scores: two copies, and dropout's mask and result."""
    if parallel.implementation.attention != "unfused":
        return 0.0
    scores = parallel.micro_batch * spec.heads / parallel.tensor * parallel.seq * parallel.seq / parallel.context
    return scores * (5.0 if spec.dropout else 2.0)


def _input_nbytes(parallel: ParallelSpec) -> float:
    """Return the bytes of one value that a product keeps of its input."""
    return 1.0 if parallel.implementation.saves_cast and parallel.dtype in ("fp8", "fp4") else 2.0


def _norm_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    """Return the bytes that a norm keeps: its input, what it adds to that, and its result where that is not remade."""
    implementation, shards = parallel.implementation, _sequence_shards(parallel)
    residual = parallel.tokens * spec.hidden
    kept = residual * (2.0 + implementation.norm_saved_nbytes) / shards
    if implementation.recomputes_cheap:
        return kept
    return kept + _input_nbytes(parallel) * residual / (1 if implementation.keeps_gathered else shards)


def _attention_bytes(spec: TransformerSpec, parallel: ParallelSpec) -> float:
    tokens, shards = parallel.tokens, _sequence_shards(parallel)
    residual = tokens * spec.hidden
    nbytes = _norm_bytes(spec, parallel)
    nbytes += 2.0 * tokens * (spec.query_dim + spec.key_dim + spec.value_dim) / parallel.tensor
    if spec.latent is not None:
        nbytes += 2.0 * tokens * 2 * (spec.latent.query_rank + spec.latent.kv_rank + spec.latent.rope_dim)
        nbytes += 2.0 * tokens * spec.heads * (spec.latent.nope_dim + spec.latent.value_dim) / parallel.tensor
    nbytes += _attention_result_bytes(spec, parallel)
    return nbytes + _scores_bytes(spec, parallel) + (residual / shards if spec.dropout else 0.0)


def _mlp_width(spec: TransformerSpec, parallel: ParallelSpec, *, sparse: bool) -> float:
    """Return the values between the MLP's matrices on this rank, all experts that see its tokens together."""
    if not sparse or spec.experts is None:
        return parallel.tokens * spec.ffn / parallel.tensor
    routed = parallel.tokens * spec.experts.top_k * parallel.expert_tensor / parallel.tensor
    shared = parallel.tokens * spec.experts.shared_ffn / parallel.tensor
    return routed * spec.experts.ffn / parallel.expert_tensor + shared


def _mlp_bytes(spec: TransformerSpec, parallel: ParallelSpec, *, sparse: bool) -> float:
    implementation = parallel.implementation
    tokens, shards = parallel.tokens, _sequence_shards(parallel)
    residual = tokens * spec.hidden
    nbytes = _norm_bytes(spec, parallel)
    width = _mlp_width(spec, parallel, sparse=sparse)
    read = 2.0 if spec.gated else 1.0  # by the activation
    gate = 1.0 if spec.gated and not implementation.fused else 0.0
    nbytes += width * (2.0 * (read + gate) + _input_nbytes(parallel))
    if sparse and spec.experts is not None:
        # Tokens sorted by expert, before and after (in float32 where a kernel of its own weighs them, as torchtitan's
        # moe.py @f738a03bf does), and the router's logits and scores.
        routed = tokens * spec.experts.top_k * parallel.expert_tensor / parallel.tensor
        weighed = tokens * spec.experts.top_k if implementation.unsorts_whole else routed
        nbytes += (2.0 * routed + (2.0 if implementation.fused else 4.0) * weighed) * spec.hidden
        nbytes += implementation.router_nbytes * residual
        nbytes += 4.0 * tokens * spec.experts.count * 2
    return nbytes + (residual / shards if spec.dropout else 0.0)


def _selective_mean_bytes(spec: TransformerSpec, parallel: ParallelSpec, *, sparse: bool) -> float:
    """Return what selective checkpointing keeps of a layer, on average over those in low precision and the others."""
    implementation = parallel.implementation
    plain = _selective_bytes(spec, parallel, implementation.kept_products, sparse=sparse)
    if parallel.dtype not in ("fp8", "fp4"):
        return plain
    cast = _selective_bytes(spec, parallel, implementation.cast_kept_products, sparse=sparse)
    return plain + implementation.cast_share * (cast - plain)


def _selective_bytes(spec: TransformerSpec, parallel: ParallelSpec, products: KeptProducts, *, sparse: bool) -> float:
    """Return what torchtitan's op policy keeps: the block's input, attention's result, results of products.

    Every second of q, k, v, o and gate, up, down are q, v, gate and down, of which backward reads all but down's: the
    residual addition after it keeps nothing. Eager keeps it regardless, as a whole (not yet reduced) value of each
    tensor rank; reduce-scattered results are kept as well, and what all-to-alls return where ``keeps_exchanged``.
    Products of experts are in no version's list.
    """
    implementation = parallel.implementation
    tokens, shards = parallel.tokens, _sequence_shards(parallel)
    unread = (
        tokens * spec.hidden * (1.0 + (1.0 / shards if shards > 1 else 0.0)) if implementation.keeps_unread else 0.0
    )
    values = tokens * spec.hidden / shards  # the block's input
    values += tokens * spec.hidden / shards if shards > 1 else 0.0  # what attention's result is reduced to
    values += unread if products != "none" else 0.0
    values += _kept_products(spec, parallel, products, sparse=sparse)
    attention = _attention_result_bytes(spec, parallel) if implementation.keeps_attention else 0.0
    if sparse and implementation.keeps_exchanged and parallel.expert > 1 and spec.experts is not None:
        values += 2.0 * tokens * spec.experts.top_k * spec.hidden * parallel.expert_tensor / parallel.tensor
    return 2.0 * values + attention


def _alternate_width(spec: TransformerSpec, tensor: int) -> float:
    """Return the width of every other product's result before attention, on one tensor rank.

    Of q, k, v the first and the third. Latent attention has q, kv's bottleneck and kv (keys and values at once), or q's
    bottleneck, q, kv's bottleneck and kv; bottlenecks are not split.
    """
    latent = spec.latent
    if latent is None:
        return (spec.query_dim + spec.value_dim) / tensor
    if latent.query_rank:
        return float(latent.query_rank + latent.kv_rank + latent.rope_dim)
    return (spec.query_dim + spec.heads * (latent.nope_dim + latent.value_dim)) / tensor


def _kept_products(spec: TransformerSpec, parallel: ParallelSpec, products: KeptProducts, *, sparse: bool) -> float:
    """Return the values of products' results that are kept and that backward reads."""
    if products == "none":
        return 0.0
    tokens, tensor = parallel.tokens, parallel.tensor
    width = _mlp_width(spec, parallel, sparse=False)
    if sparse and spec.experts is not None:
        width = tokens * spec.experts.shared_ffn / tensor
    if products == "alternate":
        return tokens * _alternate_width(spec, tensor) + width
    values = tokens * (spec.query_dim + spec.value_dim) / tensor + width
    values += width * (spec.mlp_matrices - 2)
    if spec.latent is None:
        values += tokens * spec.key_dim / tensor
    else:  # keys and values come from one product, whose input comes from another
        values += tokens * spec.heads * spec.latent.nope_dim / tensor
        values += tokens * (spec.latent.query_rank + spec.latent.kv_rank + spec.latent.rope_dim)
    return values + tokens * spec.hidden  # attention's projection, before it is reduced
