"""The dimensions of a stack of transformer layers, its parameters and its FLOPs.

Counts follow from the shapes and are exact. A linear with ``k`` inputs and ``n`` outputs has ``k n`` parameters and
costs ``2 k n`` FLOPs per token in forward and twice that in backward. Attention costs ``2 s (d_qk + d_v)`` FLOPs per
token and head, half of that under a causal mask. Biases are not counted (0.01 % of the parameters of GPT-3), nor the
FLOPs of element-wise ops.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class MultiHeadLatentAttention:
    """DeepSeek's multi-head latent attention (MLA): ranks of its two bottlenecks, and its head dims.

    Attributes:
        query_rank, kv_rank: ranks of the bottleneck of queries, and of that of keys and values; ``query_rank`` 0 is a
            query projection without a bottleneck (DeepSeek-V2-Lite).
        nope_dim, rope_dim, value_dim: head dims without and with rotary embedding, and of values.
    """

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts of a layer: ``count`` experts of width ``ffn``, ``top_k`` of which process each token.

    Attributes:
        shared_ffn: total width of the shared experts, which process every token; 0 for none.
        bias: whether an expert's linears have biases, which are weighted with the token's probability.
        every: one layer in ``every`` is sparse, after ``first_dense`` dense layers.
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    bias: bool = False
    first_dense: int = 0
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """One stack of equal transformer layers between an embedding and a vocabulary projection.

    Attributes:
        ffn: MLP width of a dense layer.
        gated: whether the MLP has a gate in addition to its up projection (SwiGLU).
        tied: whether embedding and vocabulary projection are one parameter.
        positions: learned positions; 0 for none.
        window: keys that a query attends to in every second layer; 0 for full attention in all layers.
        layer_norm: whether norms are LayerNorm; else RMSNorm.
        squared_relu: whether the activation is a squared ReLU, which no framework fuses.
        query_norm: whether queries and keys are normalized.
        dropout: whether dropout is on; frameworks before 2023 trained with it.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    positions: int = 0
    causal: bool = True
    window: int = 0
    layer_norm: bool = False
    dropout: bool = False
    squared_relu: bool = False
    query_norm: bool = False
    experts: Experts | None = None
    mla: MultiHeadLatentAttention | None = None

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.vocab)
        if min(sizes) < 1 or min(self.ffn, self.positions, self.window) < 0:
            raise ValueError(f"{self} has a dimension below 1; all but ffn, positions and window are 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads are not a multiple of {self.kv_heads} kv_heads; give a divisor of heads"
            )

    def on_tensor_ranks(self, tensor: int) -> TransformerSpec:
        """Return the dimensions that ``tensor`` ranks hold together, with every copy of a key-value head.

        If ``tensor`` divides the key-value heads, they are split. If they divide ``tensor``, each rank holds one whole
        head, as in Megatron. Otherwise a rank holds all of them, or one for each of its query heads where all of them
        do not group its query heads evenly, as attention kernels require.
        """
        if self.mla is not None or self.heads % tensor or self.kv_heads % tensor == 0:
            return self
        queries = self.heads // tensor
        whole = self.kv_heads if queries % self.kv_heads == 0 else queries
        return dataclasses.replace(self, kv_heads=tensor * (1 if tensor % self.kv_heads == 0 else whole))

    @property
    def query_dim(self) -> int:
        """Total width of the query heads."""
        return self.heads * (self.head_dim if self.mla is None else self.mla.nope_dim + self.mla.rope_dim)

    @property
    def key_dim(self) -> int:
        """Total width of the key heads, as attention reads them."""
        return self.query_dim if self.mla is not None else self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Total width of the value heads, as attention reads them."""
        return self.heads * self.mla.value_dim if self.mla is not None else self.kv_heads * self.head_dim

    @property
    def attention_out_dim(self) -> int:
        """Width of attention's result."""
        return self.heads * (self.head_dim if self.mla is None else self.mla.value_dim)

    @cached_property
    def sparse_layers(self) -> int:
        """Number of layers with experts."""
        if self.experts is None:
            return 0
        return sum(1 for layer in range(self.experts.first_dense, self.layers) if (layer + 1) % self.experts.every == 0)

    @property
    def dense_layers(self) -> int:
        """Number of layers without experts."""
        return self.layers - self.sparse_layers

    @property
    def mlp_matrices(self) -> int:
        """Weight matrices of one MLP: three where it is gated, else two."""
        return 3 if self.gated else 2

    @cached_property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention projections."""
        if self.mla is None:
            return self.hidden * (self.query_dim + self.key_dim + self.value_dim + self.attention_out_dim)
        mla = self.mla
        query = mla.query_rank * (self.hidden + self.query_dim) if mla.query_rank else self.hidden * self.query_dim
        kv = self.hidden * (mla.kv_rank + mla.rope_dim)
        kv += mla.kv_rank * self.heads * (mla.nope_dim + mla.value_dim)
        return query + kv + self.hidden * self.attention_out_dim

    @property
    def norm_parameters(self) -> int:
        """Parameters of one layer's two norms."""
        return 2 * self.hidden * (2 if self.layer_norm else 1)

    @property
    def dense_mlp_parameters(self) -> int:
        """Parameters of the MLP of a layer without experts."""
        return self.mlp_matrices * self.hidden * self.ffn

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of one sparse layer."""
        return 0 if self.experts is None else self.mlp_matrices * self.hidden * self.experts.ffn * self.experts.count

    @property
    def shared_mlp_parameters(self) -> int:
        """Parameters of one sparse layer's shared experts and router."""
        if self.experts is None:
            return 0
        return self.shared_expert_parameters + self.hidden * self.experts.count

    @property
    def shared_expert_parameters(self) -> int:
        """Parameters of one sparse layer's shared experts."""
        return 0 if self.experts is None else self.mlp_matrices * self.hidden * self.experts.shared_ffn

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and learned positions."""
        return (self.vocab + self.positions) * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All parameters; a tied one counts once."""
        per_layer = self.attention_parameters + self.norm_parameters
        mlps = self.dense_layers * self.dense_mlp_parameters
        mlps += self.sparse_layers * (self.expert_parameters + self.shared_mlp_parameters)
        head = self.hidden + (0 if self.tied else self.vocab * self.hidden)
        return self.layers * per_layer + mlps + self.embedding_parameters + head

    @cached_property
    def active_matmul_parameters(self) -> int:
        """Parameters in the GEMMs of one token: all linears and its experts, without the embedding."""
        active = self.layers * self.attention_parameters + self.dense_layers * self.dense_mlp_parameters
        if self.experts is not None:
            routed = self.expert_parameters * self.experts.top_k // self.experts.count
            active += self.sparse_layers * (routed + self.shared_mlp_parameters)
        return active + self.vocab * self.hidden

    def attended_keys(self, seq: int) -> float:
        """Return the keys that one query attends to, averaged over the sequence and the layers."""
        full = seq / 2 if self.causal else float(seq)
        if not self.window or self.window >= seq:
            return full
        windowed = self.window * (1 - self.window / (2 * seq)) if self.causal else float(self.window)
        return (full + windowed) / 2

    def attention_flops_per_token(self, seq: int) -> float:
        """Return the forward FLOPs of both GEMMs of attention, of all layers, for one token."""
        heads = self.query_dim + self.attention_out_dim
        return 2.0 * self.layers * heads * self.attended_keys(seq)

    def model_flops(self, tokens: float, seq: int) -> float:
        """Return the FLOPs of forward and backward over ``tokens`` tokens in sequences of ``seq``.

        Backward counts as twice forward. Recomputation is not counted, neither checkpointing's nor a flash kernel's.
        """
        return 3.0 * tokens * (2.0 * self.active_matmul_parameters + self.attention_flops_per_token(seq))
