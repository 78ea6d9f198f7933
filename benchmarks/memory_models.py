"""The small models that ``memory`` measures: constructors, inputs of a call, and tensor-parallel plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers
from torch import nn

BATCH, SEQ = 8, 64

_WIDTHS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
_TEXT: dict[str, Any] = {**_WIDTHS, "vocab_size": 512, "max_position_embeddings": 128}
_GROUPED: dict[str, Any] = {**_TEXT, "num_key_value_heads": 4, "head_dim": 16}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_IMAGES: dict[str, Any] = {**_WIDTHS, **_NO_DROPOUT, "image_size": 64, "patch_size": 8, "num_labels": 16}

_IMAGE_STYLES = ("attention.q_proj attention.k_proj attention.v_proj mlp.fc1", "attention.o_proj mlp.fc2")


def _styles(block: str, colwise: str, rowwise: str) -> dict[str, str]:
    """Return the tensor-parallel plan of equal blocks, from the names of their modules separated by spaces."""
    return {
        f"{block}.{name}": style
        for style, names in (("colwise", colwise), ("rowwise", rowwise))
        for name in names.split()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, the kind of its inputs, and a tensor-parallel plan where its config has none.

    Attributes:
        make: returns the module.
        takes: inputs of a call: "causal", "masked", "images" or "pair" (encoder and decoder).
        tp_plan: FQN pattern of modules -> style; None for the model's own.
    """

    make: Callable[[], nn.Module]
    takes: str
    tp_plan: Mapping[str, str] | None = None


def _hf(model: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**fields))
        return built

    return make


def _with_adapters(targets: str | list[str]) -> Callable[[], nn.Module]:
    """Return a constructor of a frozen Llama with LoRA adapters at the linear layers ``targets``."""

    def make() -> nn.Module:
        base = _hf("LlamaForCausalLM", "LlamaConfig", **_GROUPED)()
        adapters = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
        built: nn.Module = peft.get_peft_model(base, adapters)
        return built

    return make


CASES = {
    "llama": Case(make=_hf("LlamaForCausalLM", "LlamaConfig", **_GROUPED), takes="causal"),
    "lora": Case(
        make=_with_adapters("all-linear"), takes="causal", tp_plan={"base_model.model.lm_head": "colwise_rep"}
    ),
    "lora-qv": Case(
        make=_with_adapters(["q_proj", "v_proj"]),
        takes="causal",
        tp_plan=_styles("base_model.model.model.layers.*", "mlp.gate_proj mlp.up_proj", "mlp.down_proj"),
    ),
    "mistral": Case(make=_hf("MistralForCausalLM", "MistralConfig", **_GROUPED), takes="causal"),
    "qwen2": Case(make=_hf("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED), takes="causal"),
    "qwen3": Case(make=_hf("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED), takes="causal"),
    "gemma": Case(make=_hf("GemmaForCausalLM", "GemmaConfig", **_GROUPED), takes="causal"),
    "phi": Case(make=_hf("PhiForCausalLM", "PhiConfig", **_TEXT), takes="causal"),
    "opt": Case(
        make=_hf(
            "OPTForCausalLM",
            "OPTConfig",
            hidden_size=128,
            ffn_dim=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            vocab_size=512,
            max_position_embeddings=128,
            word_embed_proj_dim=128,
            dropout=0.0,
        ),
        takes="causal",
        tp_plan=_styles(
            "model.decoder.layers.*",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj fc1",
            "self_attn.out_proj fc2",
        ),
    ),
    "bert": Case(
        make=_hf("BertForMaskedLM", "BertConfig", **_TEXT, **_NO_DROPOUT),
        takes="masked",
        tp_plan=_styles(
            "bert.encoder.layer.*",
            "attention.self.query attention.self.key attention.self.value intermediate.dense",
            "attention.output.dense output.dense",
        ),
    ),
    "distilbert": Case(
        make=_hf(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            dim=128,
            hidden_dim=512,
            n_layers=4,
            n_heads=8,
            vocab_size=512,
            max_position_embeddings=128,
            dropout=0.0,
            attention_dropout=0.0,
        ),
        takes="masked",
        tp_plan=_styles(
            "distilbert.transformer.layer.*",
            "attention.q_lin attention.k_lin attention.v_lin ffn.lin1",
            "attention.out_lin ffn.lin2",
        ),
    ),
    "vit": Case(
        make=_hf("ViTForImageClassification", "ViTConfig", **_IMAGES),
        takes="images",
        tp_plan=_styles("vit.layers.*", *_IMAGE_STYLES),
    ),
    "deit": Case(
        make=_hf("DeiTForImageClassification", "DeiTConfig", **_IMAGES),
        takes="images",
        tp_plan=_styles("deit.layers.*", *_IMAGE_STYLES),
    ),
    "t5": Case(
        make=_hf(
            "T5ForConditionalGeneration",
            "T5Config",
            d_model=128,
            d_kv=16,
            d_ff=384,
            num_layers=3,
            num_heads=8,
            vocab_size=512,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        takes="pair",
        tp_plan={
            **_styles("*.block.*.layer.*.SelfAttention", "q k v", "o"),
            **_styles("*.block.*.layer.*.EncDecAttention", "q k v", "o"),
            **_styles("*.block.*.layer.*.DenseReluDense", "wi", "wo"),
        },
    ),
}


def inputs_of(case: Case) -> dict[str, Any]:
    """Return the arguments of one call with the global batch, labels included."""
    if case.takes == "images":
        return {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": torch.randint(0, 16, (BATCH,))}
    ids = torch.randint(0, 512, (BATCH, SEQ))
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    if case.takes == "pair":
        inputs["decoder_input_ids"] = ids.clone()
    return inputs if case.takes == "masked" else {**inputs, "use_cache": False}
