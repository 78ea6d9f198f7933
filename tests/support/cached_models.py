"""Tiny models of transformers of which a step of decoding reads states, or keys and values, that ops hold."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
RECURRENT: dict[str, dict[str, Any]] = {
    # Mamba alone, beside attention in one block, and in turn with it; gated delta rule; short convolutions
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "falcon_h1": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_d_ssm": 64, **MAMBA},
    "bamba": {
        **MAMBA,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_layer_indices": [1],
        "mamba_d_head": 16,
    },
    "qwen3_next": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
}


def recurrent_model(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SMALL, **RECURRENT[name])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


ENCODER_DECODERS = ("bart", "t5", "whisper")
FRAMES = 20
"""Positions of the tiny Whisper's encoder."""


def encoder_decoder(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    if name == "t5":
        config = transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=256)
        return transformers.T5ForConditionalGeneration(config).eval()
    if name == "bart":
        config = transformers.BartConfig(d_model=64, vocab_size=256, max_position_embeddings=128, **layers, **heads)
        return transformers.BartForConditionalGeneration(config).eval()
    sound = {"max_source_positions": FRAMES, "num_mel_bins": 8, "max_target_positions": 128}
    config = transformers.WhisperConfig(d_model=64, vocab_size=256, pad_token_id=0, **sound, **layers, **heads)
    return transformers.WhisperForConditionalGeneration(config).eval()


EAGER: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16},
    "gpt_oss": {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
    "bloom": {"n_head": 4, "n_layer": 2},
    "gpt_neo": {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 16},
}
"""Attention that is no single op: with soft-capped scores, with sinks, with ALiBi, or written out."""


def eager_model(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(name, **{**sizes, **EAGER[name]})
    ).eval()
