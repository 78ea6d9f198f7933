"""Small models of many Hugging Face architectures, six or more blocks deep: built from their config classes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from api.requests.model_registry import load_model

BLOCKS = 7
SEQ = 16
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": BLOCKS,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_ENCODER: dict[str, Any] = {name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_IMAGES = {"image_size": 32, "patch_size": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model type with the sizes of a small model of it.

    Attributes:
        repeats: how many lists of equal blocks it has at least, of which three are traced for all.
    """

    model_type: str
    config: dict[str, Any]
    repeats: int = 1

    def build(self) -> nn.Module:
        """Return the model on the meta device."""
        return load_model({"hf_config": {"model_type": self.model_type, **self.config}}).module


def _of(model_type: str, sizes: dict[str, Any], *, repeats: int = 1, **more: Any) -> Architecture:
    return Architecture(model_type=model_type, config={**sizes, **more}, repeats=repeats)


ARCHITECTURES: dict[str, Architecture] = {
    # --- causal, every block alike ---
    "qwen2": _of("qwen2", _SIZES),
    "qwen3": _of("qwen3", _SIZES, head_dim=8),
    "phi": _of("phi", _SIZES),
    "phi3": _of("phi3", _SIZES),
    "mistral, sliding window": _of("mistral", _SIZES, sliding_window=8),
    "opt": _of("opt", _ENCODER, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0),
    "gpt_neox": _of("gpt_neox", _ENCODER),
    "gptj": _of("gptj", {}, n_embd=32, n_layer=BLOCKS, n_head=4, n_positions=64, vocab_size=64, rotary_dim=8),
    "falcon": _of("falcon", _ENCODER),
    "bloom": _of("bloom", {}, hidden_size=32, n_layer=BLOCKS, n_head=4, vocab_size=64),
    "olmo2": _of("olmo2", _SIZES),
    "stablelm": _of("stablelm", _SIZES),
    "starcoder2": _of("starcoder2", _SIZES),
    "granite": _of("granite", _SIZES),
    "cohere": _of("cohere", _SIZES),
    "gemma": _of("gemma", _SIZES, head_dim=8),
    "glm": _of("glm", _SIZES, head_dim=8),
    "codegen": _of("codegen", {}, n_embd=32, n_layer=BLOCKS, n_head=4, n_positions=64, vocab_size=64, rotary_dim=8),
    # --- causal, blocks of two kinds by turns ---
    "gemma2, alternating attention": _of("gemma2", _SIZES, head_dim=8, sliding_window=8, repeats=0),
    "gemma3, one in six attends to all": _of(
        "gemma3_text", _SIZES | {"num_hidden_layers": 13}, head_dim=8, sliding_window=8, repeats=0
    ),
    "gpt_neo, alternating attention": _of(
        "gpt_neo",
        {},
        hidden_size=32, num_layers=8, num_heads=4, vocab_size=64, max_position_embeddings=64, window_size=8,
        attention_types=[[["global", "local"], 4]],
        repeats=0,
    ),
    "cohere2, one in four attends to all": _of(
        "cohere2", _SIZES | {"num_hidden_layers": 12}, sliding_window=8, repeats=0
    ),
    # --- experts ---
    "mixtral": _of("mixtral", _SIZES, num_local_experts=4),
    "qwen2_moe": _of("qwen2_moe", _SIZES, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32),
    "deepseek_v3, dense blocks first": _of(
        "deepseek_v3", _SIZES | {"num_hidden_layers": 9, "num_key_value_heads": 4},
        first_k_dense_replace=2, n_routed_experts=4, moe_intermediate_size=32, n_group=2, topk_group=1,
        num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
    # --- masked ---
    "bert": _of("bert", _ENCODER, **_NO_DROPOUT),
    "roberta": _of("roberta", _ENCODER, **_NO_DROPOUT),
    "distilbert": _of(
        "distilbert", {}, dim=32, hidden_dim=64, n_layers=BLOCKS, n_heads=4, vocab_size=64, max_position_embeddings=64
    ),
    "electra": _of("electra", _ENCODER, embedding_size=32, **_NO_DROPOUT),
    "albert, one block many times": _of("albert", _ENCODER, embedding_size=16, repeats=0),
    "modernbert, one in three attends to all": _of(
        "modernbert", _ENCODER | {"num_hidden_layers": 12}, local_attention=8, repeats=0
    ),
    # --- encoder and decoder ---
    "bart": _of(
        "bart", {}, d_model=32, encoder_layers=6, decoder_layers=7, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=64, max_position_embeddings=64,
        pad_token_id=0,
        repeats=0,  # run eagerly, its decoder asks a mask on meta for its values; export does not
    ),
    "t5": _of(
        "t5", {}, d_model=32, d_kv=8, d_ff=64, num_layers=7, num_decoder_layers=8, num_heads=4, vocab_size=64,
        decoder_start_token_id=0, dropout_rate=0.0, repeats=2,
    ),
    # --- vision ---
    "vit": _of("vit", {n: s for n, s in _ENCODER.items() if n not in ("vocab_size", "pad_token_id")}, **_IMAGES),
    "deit": _of("deit", {n: s for n, s in _ENCODER.items() if n not in ("vocab_size", "pad_token_id")}, **_IMAGES),
    "dinov2": _of("dinov2", {}, hidden_size=32, num_hidden_layers=BLOCKS, num_attention_heads=4, **_IMAGES),
    "swin, four stages": _of(
        "swin", {}, image_size=64, patch_size=2, embed_dim=8, depths=[2, 2, 6, 2], num_heads=[1, 2, 4, 4],
        window_size=4, repeats=0,
    ),
}  # fmt: skip
