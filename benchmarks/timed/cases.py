"""The models that are timed: real sizes, random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model to train or to run.

    Attributes:
        make: returns the module.
        inputs: returns the arguments of its call, on the device that the context says.
        options: fields of the job.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)


def _tokens(vocabulary: int, batch: int, seq: int) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        ids = torch.randint(0, vocabulary, (batch, seq))
        return {"input_ids": ids, "labels": ids}

    return inputs


def _images(batch: int, classes: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": torch.randint(0, classes, (batch,))}


def _encoder_decoder(vocabulary: int, batch: int, seq: int) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        ids = torch.randint(1, vocabulary, (batch, seq))
        return {"input_ids": ids, "decoder_input_ids": ids, "labels": ids, "use_cache": False}

    return inputs


def _llama_1b() -> Any:
    # https://huggingface.co/meta-llama/Llama-3.2-1B, config.json, without the scaling of its rotary angles
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64,
            num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=131_072, tie_word_embeddings=True,
            use_cache=False,
        )
    )  # fmt: skip


def _qwen3_2b() -> Any:
    # https://huggingface.co/Qwen/Qwen3-1.7B, config.json
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, head_dim=128,
            num_key_value_heads=8, vocab_size=151_936, max_position_embeddings=40_960, tie_word_embeddings=True,
            use_cache=False,
        )
    )  # fmt: skip


def _mixtral_1b() -> Any:
    """Mixtral's shape with a quarter of its width and a quarter of its layers: 1.5 billion parameters."""
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=1024, intermediate_size=3584, num_hidden_layers=12, num_attention_heads=16,
            num_key_value_heads=4, vocab_size=32_000, num_local_experts=8, use_cache=False,
        )
    )  # fmt: skip


def _t5_large() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=1024, d_ff=4096, num_layers=24, num_heads=16, d_kv=64, vocab_size=32_128, decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )  # fmt: skip


def _bert_large() -> Any:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _vit_large() -> Any:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, num_labels=1000
        )
    )


def _gpt2(**changed: Any) -> Callable[[], nn.Module]:
    options = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False} | changed
    return lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))


_LLAMA = _tokens(128_256, 4, 4096)
CASES: dict[str, Case] = {
    "gpt2": Case(make=_gpt2(), inputs=_tokens(50_257, 16, 1024)),
    "gpt2-micro-batches-4": Case(make=_gpt2(), inputs=_tokens(50_257, 32, 1024), options={"micro_batches": 4}),
    "gpt2-xl": Case(
        make=_gpt2(n_embd=1600, n_layer=48, n_head=25), inputs=_tokens(50_257, 4, 1024), options={"ac": "full"}
    ),
    "bert-large": Case(make=_bert_large, inputs=_tokens(30_522, 32, 512)),
    "vit-large": Case(make=_vit_large, inputs=_images(64, 1000)),
    "t5-large": Case(make=_t5_large, inputs=_encoder_decoder(32_128, 8, 512)),
    "llama-1b": Case(make=_llama_1b, inputs=_tokens(128_256, 2, 4096), options={"ac": "none"}),
    "llama-1b-selective": Case(make=_llama_1b, inputs=_LLAMA, options={"ac": "selective"}),
    "llama-1b-full": Case(make=_llama_1b, inputs=_LLAMA, options={"ac": "full"}),
    "qwen3-1.7b-full": Case(make=_qwen3_2b, inputs=_tokens(151_936, 2, 4096), options={"ac": "full"}),
    "mixtral-1.5b": Case(make=_mixtral_1b, inputs=_tokens(32_000, 8, 1024)),
    "convnext-base": Case(
        make=lambda: transformers.ConvNextForImageClassification(
            transformers.ConvNextConfig(
                depths=[3, 3, 27, 3], hidden_sizes=[128, 256, 512, 1024], num_labels=1000, drop_path_rate=0.0
            )
        ),
        inputs=_images(64, 1000),
    ),
    "resnet-50": Case(
        make=lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000)),
        inputs=_images(128, 1000),
    ),
    "llama-1b-prefill": Case(
        make=_llama_1b,
        inputs=lambda: {"input_ids": torch.randint(0, 128_256, (4, 8192))},
        options={"phase": "prefill"},
    ),
    "llama-1b-fused": Case(make=_llama_1b, inputs=_LLAMA, options={"ac": "selective", "techniques": ["fused-ops"]}),
}
