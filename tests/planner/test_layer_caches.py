"""Caches of windows, latents and recurrent states: bytes as transformers' own cache holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache

from planner import build_plan
from planner.errors import GraphFormatError, JobError
from planner.graph.trace_module import trace_module
from planner.wire.codec import read_graph, write_graph
from planner.wire.encode import document_of

SEQ, BATCH = 64, 2
CONFIGS: dict[str, Any] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "head_dim": 8},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
}
"""Every second or third layer without a window, all with one, and the first without."""


def model_of(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        name,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        sliding_window=16,
        **CONFIGS[name],
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def cached_nbytes(model: transformers.PreTrainedModel, steps: int) -> int:
    """Return the bytes in transformers' cache after a prompt of ``SEQ`` tokens and ``steps`` steps of decoding."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(BATCH, SEQ, dtype=torch.long), cache=cache)
        for _ in range(steps):
            model(torch.zeros(BATCH, 1, dtype=torch.long), cache=cache)
    return sum(tensor.numel() * tensor.itemsize for layer in cache.layers for tensor in (layer.keys, layer.values))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("phase", "steps"), [("prefill", 0), ("decode", 1)])
def test_the_cache_has_the_bytes_of_transformers_own(name: str, phase: Any, steps: int) -> None:
    model = model_of(name)
    plan = build_plan(model, cluster="1x1xtoy", phase=phase, batch=BATCH, seq=SEQ, dtype="fp32")
    assert plan.estimate.memory["kv_cache"] == cached_nbytes(model, steps)
    assert any("keep at most 15 tokens" in note for note in plan.notes)


def test_repeated_heads_are_not_kept() -> None:
    """Heads of keys are repeated for those of queries where attention takes a mask; a rank keeps at least one."""
    model = model_of("gemma3_text")
    whole = cached_nbytes(model, 0)
    plan = build_plan(model, cluster="1x4xtoy", mesh="tp=4", phase="prefill", batch=BATCH, seq=SEQ, dtype="fp32")
    assert plan.estimate.memory["kv_cache"] in (whole / 2, whole)  # two heads on four ranks: one each, or both


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
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
    config = transformers.AutoConfig.for_model(name, **SMALL, **RECURRENT[name])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def all_nbytes(layer: Any) -> int:
    """Return the bytes of all that a layer of transformers' cache holds."""
    held = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    held += [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return sum(tensor.nbytes for tensor in held if tensor is not None)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_states_are_counted_and_decoding_is_refused(name: str) -> None:
    model = recurrent_model(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(BATCH, SEQ, dtype=torch.long), cache=cache)
    plan = build_plan(model, cluster="1x1xtoy", phase="prefill", batch=BATCH, seq=SEQ, dtype="fp32")
    assert plan.estimate is not None
    assert plan.estimate.memory["kv_cache"] == sum(map(all_nbytes, cache.layers))
    with pytest.raises(JobError, match="decoding with recurrent layers or sparse attention cannot be planned yet"):
        build_plan(model, cluster="1x1xtoy", phase="decode", batch=BATCH, seq=SEQ)


def test_decoding_with_the_keys_of_an_indexer_is_refused() -> None:
    """DeepSeek-V3.2 chooses tokens by keys that its indexer caches beside the latents."""
    config = transformers.DeepseekV32Config(num_hidden_layers=2, vocab_size=96)
    with torch.device("meta"):
        model = transformers.DeepseekV32ForCausalLM(config)
    with pytest.raises(JobError, match=r"sparse attention cannot be planned yet.*DynamicIndexedLayer"):
        build_plan(model, cluster="1x1xtoy", phase="decode", batch=BATCH, seq=SEQ)


def deepseek_v2(layers: int = 2, **dims: Any) -> transformers.PreTrainedModel:
    small = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "num_attention_heads": 4}
    latents = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_shared_experts": 1}
    groups = {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
    config = transformers.DeepseekV2Config(
        num_hidden_layers=layers, **{**small, **latents, **experts, **groups, **dims}
    )
    return transformers.DeepseekV2ForCausalLM(config).eval()


@pytest.mark.parametrize(("phase", "steps"), [("prefill", 0), ("decode", 1)])
def test_latents_are_cached_in_place_of_keys_and_values(phase: Any, steps: int) -> None:
    model = deepseek_v2()
    plan = build_plan(model, cluster="1x1xtoy", phase=phase, batch=BATCH, seq=SEQ, dtype="fp32")
    assert plan.estimate is not None
    assert plan.estimate.memory["kv_cache"] == cached_nbytes(model, steps)


def test_deepseek_v2_lite_caches_31104_bytes_of_a_token() -> None:
    """27 layers of 512 latents and 64 rotary keys in two bytes each; heads are not cached, so they may be few."""
    model = deepseek_v2(layers=27, kv_lora_rank=512, qk_rope_head_dim=64)
    plan = build_plan(model, cluster="1x2xtoy", mesh="tp=2", phase="decode", batch=1, seq=SEQ, memory_gb=100)
    assert plan.estimate is not None
    assert plan.estimate.memory["kv_cache"] == 31_104 * (SEQ + 1)


def test_keys_and_values_of_earlier_tokens_are_computed_from_latents_in_every_step() -> None:
    model = deepseek_v2()
    job: dict[str, Any] = {"cluster": "1x1xtoy", "phase": "decode", "batch": BATCH, "dtype": "fp32", "memory_gb": 1}
    short, long = (build_plan(model, seq=seq, **job).estimate for seq in (1000, 3000))
    assert short is not None
    assert long is not None
    # Of each token and layer: four heads of 16 + 24 from 16 latents, and the products of 24 and of 24 with the query.
    flops = 2 * BATCH * (4 * 2 * 40 * 16 + 4 * 2 * (24 + 24))
    assert long.model_flops is not None
    assert short.model_flops is not None
    assert long.model_flops - short.model_flops == 2000 * flops
    expanded = BATCH * 2000 * 4 * (40 + 24) * 4
    assert long.memory["transient"] - short.memory["transient"] == expanded


@pytest.mark.parametrize("model", [deepseek_v2(), model_of("gemma3_text"), recurrent_model("qwen3_next")])
def test_a_graph_that_is_sent_keeps_its_caches(model: transformers.PreTrainedModel) -> None:
    sent = trace_module(model, phase="prefill", batch=BATCH, seq=SEQ, dtype="fp32")
    received = read_graph(write_graph(sent))
    caches = [op.cache for op in received.graph.ops]
    assert caches == [op.cache for op in sent.graph.ops]
    assert any(caches)


def test_a_cache_where_there_is_none_is_refused() -> None:
    sent = document_of(trace_module(deepseek_v2(), phase="prefill", batch=BATCH, seq=SEQ))
    document = sent.model_dump(mode="json", exclude_defaults=True)
    kept = next(op for op in document["ops"] if op.get("cache"))
    kept["cache"] = {"latents": [16, 4096]}
    with pytest.raises(GraphFormatError, match="no attention with keys of such a width"):
        read_graph(document)
