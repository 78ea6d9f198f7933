"""Plans of small models whose breakdown, timeline and pictures differ in kind."""

from __future__ import annotations

from functools import cache
from typing import Any

from support.pipeline_sessions import SLOW, session_of
from support.small_models import EIGHT_HEADS, TINY_LLAMA

from api.requests.model_registry import load_model, quiet_libraries
from planner import build_plan
from planner.plan.sharding_plan import ShardingPlan

_MIXTRAL = {**EIGHT_HEADS, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
_T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 64,
    "d_kv": 8,
    "d_ff": 128,
    "num_layers": 1,
    "num_heads": 8,
    "vocab_size": 256,
}
_RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp": (TINY_LLAMA, {"planner": "fsdp", "mesh": "fsdp=4", "micro_batches": 2}),
    "tensor parallel, checkpointed": (TINY_LLAMA, {"mesh": "dp=2,tp=2", "micro_batches": 2, "ac": "full"}),
    "some blocks checkpointed": (
        {**TINY_LLAMA, "num_hidden_layers": 4},
        {"mesh": "dp=2,tp=2", "micro_batches": 2, "ac": "full:2,selective"},
    ),
    "experts": (_MIXTRAL, {"mesh": "dp=4", "micro_batches": 1}),
    "encoder and decoder": (_T5, {"mesh": "dp=2,tp=2", "micro_batches": 1}),
    "prefill": (TINY_LLAMA, {"mesh": "dp=2,tp=2", "phase": "prefill"}),
    "decode": (TINY_LLAMA, {"mesh": "tp=2,dp=2", "phase": "decode"}),
}
PIPELINES: dict[str, dict[str, Any]] = {
    "1f1b": {"blocks": 2, "micro_batches": 4, "ac": "full"},
    "interleaved": {"blocks": 5, "micro_batches": 4, "ac": "none"},
}
KINDS = (*_RECIPES, *PIPELINES)
VIEWED = ("tensor parallel, checkpointed", "decode", *PIPELINES)
"""Kinds that are drawn in different ways."""


@cache
def drawn_plan(kind: str) -> ShardingPlan:
    """Return the plan of a kind, one of `KINDS`."""
    if kind in PIPELINES:
        session = session_of(SLOW, executable_only=False, **PIPELINES[kind])
        return session.plan(mesh="pp=2,dp=2")
    config, options = _RECIPES[kind]
    with quiet_libraries():
        source = load_model({"hf_config": config}, seq=32)
        return build_plan(source.module, cluster="1x4xtoy", batch=8, seq=32, dtype="fp32", **options)
