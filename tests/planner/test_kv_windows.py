"""Sliding windows of KV caches: bytes as transformers' own cache holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache

from planner import build_plan

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
