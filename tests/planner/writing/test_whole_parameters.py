"""Weights that an axis leaves whole because it does not divide them are named, with the size that it would divide."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from planner import build_plan

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def notes_of(vocabulary: int, mesh: str, planner: str) -> list[str]:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, **SIZES))
    job: dict[str, Any] = {"cluster": "1x4xtoy", "batch": 8, "seq": 16, "dtype": "fp32", "micro_batches": 1}
    return [
        note for note in build_plan(model, mesh=mesh, planner=planner, **job).notes if "computes with the whole" in note
    ]


def test_a_short_vocabulary_that_no_rank_divides_is_named() -> None:
    (note,) = notes_of(67, "fsdp=2,tp=2", "fsdp-tp")
    assert "every rank of tp, which splits other weights, computes with the whole of lm_head.weight (0 MB)" in note
    assert "2 does not divide 67" in note
    assert "Padded to 68 it could be split." in note


@pytest.mark.parametrize(
    ("vocabulary", "mesh", "planner"),
    [(256, "fsdp=2,tp=2", "fsdp-tp"), (257, "fsdp=2,tp=2", "fsdp-tp"), (67, "fsdp=4", "fsdp")],
    ids=["divided", "long enough for uneven pieces", "no weight is split in compute"],
)
def test_nothing_is_said_where_weights_are_split_or_none_is(vocabulary: int, mesh: str, planner: str) -> None:
    assert notes_of(vocabulary, mesh, planner) == []
