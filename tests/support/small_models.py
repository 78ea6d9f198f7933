"""Models that are small enough to plan within seconds."""

from __future__ import annotations

from typing import Any

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}

EIGHT_HEADS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
"""Fields of a config whose heads four ranks divide."""

TINY_REQUEST: dict[str, Any] = {
    "model": {"hf_config": dict(TINY_LLAMA)},
    "cluster": "1x4xtoy",
    "mesh": "dp=2,tp=2",
    "batch": 8,
    "seq": 32,
    "micro_batches": 1,
    "ac": "none",
    "dtype": "fp32",
}
"""What a client sends for a plan of it."""
