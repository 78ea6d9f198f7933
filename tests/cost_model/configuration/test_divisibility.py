"""Every size that a degree does not divide is listed, and key-value heads are whole on each tensor rank."""

from __future__ import annotations

import dataclasses

import pytest

from cost_model.configuration.divisibility import uneven_splits
from cost_model.configuration.memory import step_memory
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.transformer import Experts, TransformerSpec
from cost_model.hardware.cluster import ClusterSpec

QWEN = TransformerSpec(layers=24, hidden=896, heads=14, kv_heads=2, head_dim=64, ffn=4864, vocab=151936, tied=True)
MIXTRAL = TransformerSpec(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000,
    experts=Experts(count=8, top_k=2, ffn=14336),
)  # fmt: skip
ONE = ParallelSpec(micro_batch=1, seq=4096)


def uneven(spec: TransformerSpec, *, batch: int = 24, devices: int = 24, **changes: int | bool) -> list[str]:
    return uneven_splits(spec, dataclasses.replace(ONE, **changes), batch=batch, devices=devices)


def test_14_heads_on_8_ranks_name_the_legal_degrees() -> None:
    (text,) = uneven(QWEN, tensor=8)
    assert text == (
        "tp=8 does not divide 14 heads (1 or 2 would do; with 1 or 2 the 2 key-value heads are split too, and "
        "not copied)"
    )


def test_8_experts_over_3_ranks() -> None:
    (text,) = uneven(MIXTRAL, expert=3, replicate=3)
    assert text == "ep=3 does not divide 8 experts (1 would do)"
    (text,) = uneven(QWEN, expert=2, replicate=2)
    assert "the model has none" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"context": 2, "seq": 4097},
            "cp=2 does not divide a sequence of 4,097 tokens into two chunks a rank (1 would",
        ),
        ({"context": 2, "seq": 4098}, "cp=2 does not divide a sequence of 4,098 tokens"),
        ({"tensor": 2, "sequence_parallel": True, "seq": 4097}, "tp=2 does not divide the 4,097 tokens"),
        ({"pipeline": 5}, "pp=5 does not divide 24 layers (1, 2, 3, 4, 6, 8, 12 or 24 would do)"),
        ({"pipeline": 4, "virtual_stages": 5}, "24 layers into 5 virtual stages a rank"),
        ({"replicate": 5}, "5 data-parallel ranks with micro-batches of 1 do not divide a batch of 24 (20 or 25 would"),
    ],
)
def test_other_sizes(changes: dict[str, int], words: str) -> None:
    (text,) = uneven(QWEN, **changes)
    assert words in text


def test_what_divides_is_not_listed() -> None:
    assert uneven(QWEN, tensor=2, context=2, pipeline=2, replicate=3, sequence_parallel=True) == []
    assert uneven(MIXTRAL, expert=8, shard=8) == []
    llama = dataclasses.replace(MIXTRAL, layers=126, experts=None)
    assert uneven(llama, pipeline=16, devices=16) == []  # as Llama 3.1 405B was trained: the ends count as layers


def test_everything_is_listed_at_once() -> None:
    assert len(uneven(MIXTRAL, tensor=3, expert=3, context=3, pipeline=5, replicate=7)) == 5


@pytest.mark.parametrize(("tensor", "kv_heads"), [(1, 8), (2, 8), (8, 8), (16, 16), (32, 32)])
def test_a_tensor_rank_holds_whole_key_value_heads(tensor: int, kv_heads: int) -> None:
    spec = MIXTRAL.on_tensor_ranks(tensor)
    assert spec.kv_heads == kv_heads
    assert spec.key_dim / tensor == max(1, 8 // tensor) * 128


def test_key_value_heads_that_do_not_go_with_the_ranks_are_held_whole() -> None:
    assert QWEN.on_tensor_ranks(7).kv_heads == 14  # both heads on every rank
    assert QWEN.on_tensor_ranks(14).kv_heads == 14  # one head on every rank


def test_copied_key_value_heads_count_in_the_bytes_of_a_step() -> None:
    """By hand: on 16 ranks, wk and wv of 8 heads have 2 x 32 x 4,096 x 128 parameters a rank, not half of that."""
    cluster = ClusterSpec.parse("2x8xh100-sxm-80gb")
    dense = dataclasses.replace(MIXTRAL, experts=None)
    copied, split = (
        step_memory(dataclasses.replace(dense, kv_heads=heads), dataclasses.replace(ONE, tensor=16), cluster)
        for heads in (8, 16)
    )
    assert copied.peak == split.peak
    rank_parameters = copied.phases[-1].parameters / 4
    rest = dense.parameters - 2 * 32 * 4096 * 1024
    assert rank_parameters == pytest.approx(rest / 16 + 2 * 32 * 4096 * 128, rel=1e-3)
