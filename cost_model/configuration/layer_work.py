"""The GEMMs and the streamed bytes of one transformer layer on one rank, for one micro-batch.

Element-wise kernels are counted in values of two bytes that they read and write, kernel by kernel: for a fused chain
(each input read once, each output written once) and for an unfused one. Source: the frameworks' kernels; known error:
see ``step``.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.configuration.kernels import Gemm
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.transformer import TransformerSpec

BIAS_FORWARD, BIAS_BACKWARD = 14.0, 20.0
"""Values of two bytes that Megatron-Core's TEGroupedMLP._apply_bias moves per value of the experts' result, by pass.

In parentheses: bytes read, bytes written. Forward, in float32: bias times probability (0, 4), their sum with the result
(6, 4), the concatenation over experts (4, 4), the cast back (4, 2). Backward: the cast (2, 4), the result's gradient
cast (4, 2) and concatenated (2, 2), and for each of bias and probability a multiplication (4, 4) and its sum (4, 0).
Counted 2026-11-21."""


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The forward work of one layer on one rank for one micro-batch.

    Attributes:
        attention_gemms: projections around attention; the last one writes to the residual.
        mlp_gemms: GEMMs of the MLP, or of shared experts and router.
        expert_gemms: GEMMs of the routed experts on this rank.
        forward_nbytes, backward_nbytes: bytes moved by element-wise kernels.
        routed_tokens: tokens that this rank's experts process.
    """

    attention_gemms: tuple[Gemm, ...]
    mlp_gemms: tuple[Gemm, ...]
    expert_gemms: tuple[Gemm, ...]
    forward_nbytes: float
    backward_nbytes: float
    routed_tokens: float

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """All GEMMs."""
        return self.attention_gemms + self.mlp_gemms + self.expert_gemms


def layer_work(spec: TransformerSpec, parallel: ParallelSpec, *, sparse: bool) -> LayerWork:
    """Return the work of a layer, with (``sparse``) or without experts."""
    tokens, tensor = parallel.tokens, parallel.tensor
    separate = parallel.implementation.kernels.separate_linears
    mlp: tuple[Gemm, ...] = ()
    expert: tuple[Gemm, ...] = ()
    routed = 0.0
    ffn_values = 0.0
    if sparse and spec.experts is not None:
        experts = spec.experts
        mlp += (Gemm(tokens, experts.count, spec.hidden),)
        if experts.shared_ffn:
            mlp += _mlp_gemms(spec, tokens, experts.shared_ffn / tensor, separate=separate)
            ffn_values += tokens * experts.shared_ffn / tensor
        routed = tokens * experts.top_k * parallel.expert_tensor / tensor
        local = max(1, experts.count // parallel.expert)
        expert = tuple(
            Gemm(gemm.m, gemm.n, gemm.k, local)
            for gemm in _mlp_gemms(spec, routed / local, experts.ffn / parallel.expert_tensor, separate=separate)
        )
        ffn_values += routed * experts.ffn / parallel.expert_tensor
    else:
        mlp = _mlp_gemms(spec, tokens, spec.ffn / tensor, separate=separate)
        ffn_values = tokens * spec.ffn / tensor
    forward, backward = _streamed_values(spec, parallel, ffn_values, routed)
    return LayerWork(
        attention_gemms=_attention_gemms(spec, tokens, tensor, separate=separate),
        mlp_gemms=mlp,
        expert_gemms=expert,
        forward_nbytes=2 * forward,
        backward_nbytes=2 * backward,
        routed_tokens=routed,
    )


def _attention_gemms(spec: TransformerSpec, tokens: float, tensor: int, *, separate: bool) -> tuple[Gemm, ...]:
    out = Gemm(tokens, spec.hidden, spec.attention_out_dim / tensor)
    if spec.mla is None and separate:
        key = Gemm(tokens, spec.key_dim / tensor, spec.hidden)
        value = Gemm(tokens, spec.value_dim / tensor, spec.hidden)
        return Gemm(tokens, spec.query_dim / tensor, spec.hidden), key, value, out
    if spec.mla is None:
        return (Gemm(tokens, (spec.query_dim + spec.key_dim + spec.value_dim) / tensor, spec.hidden), out)
    mla = spec.mla
    query: tuple[Gemm, ...] = (Gemm(tokens, spec.query_dim / tensor, spec.hidden),)
    if mla.query_rank:
        query = (
            Gemm(tokens, mla.query_rank, spec.hidden),
            Gemm(tokens, spec.query_dim / tensor, mla.query_rank),
        )
    down = Gemm(tokens, mla.kv_rank + mla.rope_dim, spec.hidden)
    up = Gemm(tokens, spec.heads * (mla.nope_dim + mla.value_dim) / tensor, mla.kv_rank)
    return (*query, down, up, out)


def _mlp_gemms(spec: TransformerSpec, tokens: float, ffn: float, *, separate: bool) -> tuple[Gemm, ...]:
    down = Gemm(tokens, spec.hidden, ffn)
    if spec.gated and separate:
        return Gemm(tokens, ffn, spec.hidden), Gemm(tokens, ffn, spec.hidden), down
    return Gemm(tokens, ffn * (2 if spec.gated else 1), spec.hidden), down


def _streamed_values(
    spec: TransformerSpec, parallel: ParallelSpec, ffn_values: float, routed: float
) -> tuple[float, float]:
    """Return the number of two-byte values that element-wise kernels read and write, forward and backward."""
    kernels = parallel.implementation.kernels
    fused = kernels.fused_ops
    residual = parallel.tokens * spec.hidden / parallel.sequence_shards
    # Two norms (read, write) and two residual additions (read two, write one; dropout adds a byte of mask).
    slow_norm = kernels.float32_norm and not fused
    norm, norm_backward = (19.0, 40.0) if slow_norm else (2.0, 3.0)
    forward = residual * 2 * (norm + 3.0 + (0.5 if spec.dropout else 0.0))
    backward = residual * 2 * (norm_backward + 3.0 + (1.5 if spec.dropout else 0.0))
    copies = kernels.attention_copies * parallel.tokens * spec.query_dim / parallel.tensor
    forward, backward = forward + copies, backward + copies
    if spec.gated and not fused:  # q, k, v and gate, up are separate linears, whose input gradients are summed
        backward += 9.0 * parallel.tokens * spec.hidden
    gate_forward, gate_backward = (3.0, 5.0) if spec.gated else (2.0, 3.0)
    if spec.squared_relu:
        gate_forward, gate_backward = 4.0, 7.0
    if spec.gated and not fused:
        gate_forward, gate_backward = 5.0, 9.0
    forward += gate_forward * ffn_values
    backward += gate_backward * ffn_values
    if not spec.positions and not spec.layer_norm:  # rotary embedding
        rotated = parallel.tokens * (spec.query_dim + spec.key_dim) / parallel.tensor
        forward += rotated * (2.0 if fused else 10.0)
        backward += rotated * (2.0 if fused else 10.0)
    if spec.query_norm:
        normed = parallel.tokens * (spec.query_dim + spec.key_dim) / parallel.tensor
        forward, backward = forward + normed * norm, backward + normed * norm_backward
    if spec.mla is not None:  # MLA assembles keys from two parts
        forward += 3.0 * parallel.tokens * spec.key_dim / parallel.tensor
        backward += 3.0 * parallel.tokens * spec.key_dim / parallel.tensor
    moved = routed * spec.hidden  # tokens are sorted by expert and back, and weighted
    passes = 8.0 if fused else 20.0  # unfused: index, pad, weight in float32, scatter, each a kernel
    forward += moved * passes
    backward += moved * passes
    if spec.experts is not None and spec.experts.bias and parallel.implementation.experts.bias_kernels:
        forward, backward = forward + BIAS_FORWARD * moved, backward + BIAS_BACKWARD * moved
    return forward, backward
