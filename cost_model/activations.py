"""Bytes that autograd keeps of one transformer layer for its backward, by checkpointing, and what backward adds for a
while.

Counted value by value from the ops: a matrix product keeps its input, a norm its input (and its result where the
product after it does not keep the same), attention its queries, keys, values, result and one float32 per row, a gated
activation both factors. Sources: Korthikanti et al., arXiv 2205.05198, section 4 (34 s b h a layer, of which dropout
masks 4, plus 5 a s^2 b for scores that are not fused); torch's autograd formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.parallelism import ParallelSpec
from cost_model.transformer import TransformerSpec


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
    gradients = 2.0 * parallel.tokens * spec.hidden * 2 / _sequence_shards(parallel) + 2.0 * 2 * widest
    kept = {
        "none": everything,
        "attention": everything - _scores_bytes(spec, parallel),
        "selective": _selective_bytes(spec, parallel, sparse=sparse),
        "full": boundary,
    }[parallel.checkpointing]
    kept = min(kept, everything)
    return LayerBytes(saved=kept, transient=everything - kept + gradients)


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
    nbytes += 2.0 * tokens * spec.attention_out_dim / parallel.tensor
    nbytes += 4.0 * tokens * spec.heads / parallel.tensor  # log-sum-exp
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
    if sparse and spec.experts is not None:  # tokens sorted by expert, before and after, and their weights
        routed = tokens * spec.experts.top_k * parallel.expert_tensor / parallel.tensor
        nbytes += 2.0 * routed * spec.hidden * 2 + 4.0 * tokens * spec.experts.count * 2
        if not implementation.fused:  # tokens are weighed in float32, before and after the experts
            nbytes += 2 * 4.0 * routed * spec.hidden
    return nbytes + (residual / shards if spec.dropout else 0.0)


def _selective_bytes(spec: TransformerSpec, parallel: ParallelSpec, *, sparse: bool) -> float:
    """Return what torchtitan's op policy keeps: the block's input, attention's result, every second product's result.

    Of q, k, v, o and gate, up, down those are q, v, gate and down; reduce-scattered results are kept as well, and what
    all-to-alls return where ``keeps_exchanged``. Products of experts are in no version's list.
    """
    tokens, shards = parallel.tokens, _sequence_shards(parallel)
    values = 2.0 * tokens * spec.hidden / shards  # the block's input, and down's result
    values += tokens * (spec.query_dim + spec.value_dim) / parallel.tensor
    log_sums = 0.0
    if parallel.implementation.keeps_attention:
        values += tokens * spec.attention_out_dim / parallel.tensor
        log_sums = 4.0 * tokens * spec.heads / parallel.tensor
    if shards > 1:
        values += 1.0 * tokens * spec.hidden / shards
    if sparse and spec.experts is not None:
        values += tokens * spec.experts.shared_ffn / parallel.tensor
        if parallel.implementation.keeps_exchanged and parallel.expert > 1:
            values += 2.0 * tokens * spec.experts.top_k * spec.hidden * parallel.expert_tensor / parallel.tensor
    else:
        values += _mlp_width(spec, parallel, sparse=False)
    return 2.0 * values + log_sums
