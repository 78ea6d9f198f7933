"""Models of transformers, called as in most loops: with a mask of padding, and without a word on their cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from planner import build_plan

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}
BART = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 2))}
TINY = {"cluster": "1x4xtoy", "micro_batches": 1}


def made(name: str) -> PreTrainedModel:
    if name == "bart":
        return BartForConditionalGeneration(BartConfig(vocab_size=64, d_model=32, max_position_embeddings=32, **BART))
    return LlamaForCausalLM(LlamaConfig(**SMALL)) if name == "llama" else BertForMaskedLM(BertConfig(**SMALL))


def inputs(*, masked: bool) -> dict[str, Any]:
    ids = torch.zeros(8, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, **({"attention_mask": torch.ones_like(ids)} if masked else {})}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama", "bart"])
def test_data_parallelism_splits_ids_and_mask_and_moves_no_activation(name: str, masked: bool) -> None:
    plan = build_plan(made(name), example_inputs=inputs(masked=masked), mesh="dp=4", planner="ddp", **TINY)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    forward = [each for each in plan.estimate.collectives if each.phase == "forward"]
    assert all(each.kind == "all_reduce" and each.bytes <= 8 for each in forward)


@pytest.mark.parametrize("masked", [False, True])
def test_the_fastest_plan_runs_without_a_cache(masked: bool) -> None:
    plan = build_plan(made("llama"), example_inputs=inputs(masked=masked), mesh="dp=2,tp=2", tolerance=0.0, **TINY)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert plan.solver is not None
    assert plan.solver.name == "ilp"
