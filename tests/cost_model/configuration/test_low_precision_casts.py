"""Casts to 8 bits: counted by hand for one layer of a small model."""

import dataclasses
from typing import Any

import pytest

from cost_model.configuration.implementation import Implementation, KernelOptions, LowPrecisionOptions
from cost_model.configuration.layer_work import layer_work
from cost_model.configuration.low_precision_casts import cast_nbytes
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.transformer import TransformerSpec

SPEC = TransformerSpec(layers=2, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=128, vocab=256)
PARALLEL = ParallelSpec(micro_batch=2, seq=32, dtype="fp8", shard=4, zero=3)
TOKENS = 64
WEIGHTS = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128
INPUTS = TOKENS * (64 + 64 + 64 + 128)
"""Of attention, its projection, the MLP, and its last GEMM."""


def counted(parallel: ParallelSpec, **casts: Any) -> tuple[float, float]:
    implementation = Implementation(
        kernels=KernelOptions(separate_linears=True), low_precision=LowPrecisionOptions(cast_nbytes=1.0, **casts)
    )
    parallel = dataclasses.replace(parallel, implementation=implementation)
    return cast_nbytes(layer_work(SPEC, parallel, sparse=False), parallel)


def test_every_operand_is_cast_once() -> None:
    forward, backward = counted(PARALLEL)
    assert forward == INPUTS + TOKENS * 3 * 64 + WEIGHTS  # q, k, v and gate, up each cast their input
    assert backward == TOKENS * (64 + 32 + 32 + 64 + 128 + 128 + 64)


def test_linears_of_one_input_may_share_its_cast() -> None:
    assert counted(PARALLEL, shares_casts=True)[0] == INPUTS + WEIGHTS


def test_weights_are_cast_once_a_step_and_as_shards_where_shards_are_cast() -> None:
    several = dataclasses.replace(PARALLEL, micro_batches=2)
    assert counted(several, shares_casts=True)[0] == INPUTS + WEIGHTS / 2
    assert counted(PARALLEL, shares_casts=True, casts_shards=True)[0] == INPUTS + WEIGHTS / 4


def test_a_tensor_rank_casts_its_own_tokens_where_the_cast_precedes_the_all_gather() -> None:
    cut = dataclasses.replace(PARALLEL, tensor=2, sequence_parallel=True)
    forward, backward = counted(cut, shares_casts=True, casts_before_gather=True)
    assert forward == TOKENS * (32 + 32 + 32 + 64) + WEIGHTS / 2
    assert backward == TOKENS * ((64 + 32 + 32 + 128 + 128) / 2 + 32 + 32)


def test_rescaled_results_are_those_of_both_gemms_of_backward() -> None:
    plain, scaled = counted(PARALLEL)[1], counted(PARALLEL, rescale_nbytes=1.0)[1]
    gradients_of_inputs = TOKENS * (64 * 3 + 64 + 64 * 2 + 128)
    assert scaled - plain == pytest.approx(gradients_of_inputs + WEIGHTS)
