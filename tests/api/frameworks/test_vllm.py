"""vLLM's command line: published recipes, commands with faults, and launches written and read again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launches import DEGREES, check_round_trip, recipe

from api.frameworks.configurations.vllm import VLLM
from api.frameworks.launch import Launch
from planner.errors import JobError


def served(**fields: Any) -> Launch:
    return Launch(**{"phase": "decode", "micro_batch": 256, "compiled": True, **fields})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm_deepseek_r1_tp8", served(tensor=8, expert=8)),
        ("vllm_deepseek_r1_dp8", served(replicate=8, expert=8)),
        ("vllm_gpt_oss_120b", served(tensor=8, gpu_memory_share=0.95)),
        ("vllm_glm_4_7_mtp", served(tensor=4)),
        ("vllm_minimax_m2", served(tensor=4, expert=4)),
    ],
)
def test_published_recipes_are_read(name: str, expected: Launch) -> None:
    reading = recipe(VLLM, name)
    assert reading.faults == ()
    assert reading.launch == expected


def test_what_is_not_priced_is_said() -> None:
    assert recipe(VLLM, "vllm_glm_4_7_mtp").unpriced == ("--speculative-config: speculative decoding is not priced",)
    text = "vllm serve m --quantization fp8 --kv-cache-dtype fp8 --cpu-offload-gb 10"
    reading = VLLM.read(text, 1)
    assert [note.split(":")[0] for note in reading.unpriced] == [
        "--quantization",
        "--kv-cache-dtype",
        "--cpu-offload-gb",
    ]
    assert reading.launch.offload


def test_short_flags_underscores_and_units() -> None:
    text = "vllm serve m -tp 2 -pp=2 --data_parallel_size 2 --max-model-len 32K --no-enforce-eager -O3 -ep"
    reading = VLLM.read(text, 8)
    assert reading.faults == ()
    assert reading.launch == served(tensor=2, pipeline=2, replicate=2, expert=4, seq=32_768)


def test_eager_servers_are_not_compiled() -> None:
    assert not VLLM.read("vllm serve m --enforce-eager", 1).launch.compiled
    assert not VLLM.read("vllm serve m -O0", 1).launch.compiled


def test_faults_are_named_all_at_once() -> None:
    text = """vllm serve meta-llama/Llama-3.1-70B \\
  --tensor-parallel-size 8 --pipeline-parallel-size 2 --decode-context-parallel-size 3 \\
  --tensor-paralel-size 4 --enable-eplb --gpu-memory-utilization 1.2 --dtype bf16 \\
  --max-num-seqs 512 --max-num-batched-tokens 256"""
    assert set(VLLM.read(text, 8).faults) == {
        "--tensor-parallel-size 8 x --pipeline-parallel-size 2 is 16 of the cluster's 8 devices: "
        "--tensor-parallel-size 4 would do",
        "--decode-context-parallel-size 3 does not split the ranks of keys: 1 or 2 or 4 or 8 would do",
        "--tensor-paralel-size is not a flag of vLLM 0.33.0 (the closest is --tensor-parallel-size)",
        "--enable-eplb needs --enable-expert-parallel",
        "--gpu-memory-utilization 1.2 is not above 0 and at most 1: 0.92 is the default",
        "--dtype bf16 is not one of bfloat16, float16, half, float32, float, auto",
        "--max-num-batched-tokens 256 is below --max-num-seqs 512: 512 would do",
    }


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("-tp 4", "--tensor-parallel-size 4 is 4 of the cluster's 8 devices: --tensor-parallel-size 8 would do"),
        ("-tp 8 --data-parallel-size-local 2", "--data-parallel-size-local 2 is above --data-parallel-size 1"),
        ("-tp 8 --data-parallel-external-lb", "--data-parallel-external-lb needs --data-parallel-size of 2 or more"),
        ("-tp 8 --nnodes 3", "--nnodes 3 does not divide 8 processes (1, 2, 4 or 8 would do)"),
        (
            "-tp 8 --no-enable-chunked-prefill --max-model-len 8192 --max-num-batched-tokens 4096",
            "--max-num-batched-tokens 4096 is below --max-model-len 8192 without chunked prefill",
        ),
        ("-tp eight", "--tensor-parallel-size eight is not a whole number of 1 or more"),
    ],
)
def test_one_fault(flags: str, fault: str) -> None:
    faults = [text for text in VLLM.read(f"vllm serve m {flags}", 8).faults if not text.startswith("one device")]
    assert len(faults) == 1
    assert faults[0].startswith(fault)


@given(
    tensor=DEGREES,
    pipeline=DEGREES,
    replicate=DEGREES,
    context=DEGREES,
    spread=st.booleans(),
    micro_batch=st.integers(1, 2048),
    seq=st.one_of(st.none(), st.integers(1, 200_000)),
    dtype=st.sampled_from(("bf16", "fp16", "fp32")),
    compiled=st.booleans(),
    share=st.one_of(st.none(), st.sampled_from((0.5, 0.9, 0.95, 1.0))),
)
def test_launches_are_written_and_read_again(
    tensor: int,
    pipeline: int,
    replicate: int,
    context: int,
    spread: bool,
    micro_batch: int,
    seq: int | None,
    dtype: str,
    compiled: bool,
    share: float | None,
) -> None:
    launch = served(
        tensor=tensor,
        pipeline=pipeline,
        replicate=replicate,
        context=context,
        expert=tensor * replicate * context if spread else 1,
        micro_batch=micro_batch,
        seq=seq,
        dtype=dtype,
        compiled=compiled,
        gpu_memory_share=share,
    )
    check_round_trip(VLLM, launch)


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (Launch(tensor=8), "phase training"),
        (served(shard=8, zero=3), "shard 8 cannot be said"),
        (served(tensor=8, expert=4), "experts on 4 of 8 ranks"),
    ],
)
def test_launches_that_cannot_be_said_are_refused(launch: Launch, reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        VLLM.write(launch, "Llama-3.1-8B")


def test_what_differs_is_said() -> None:
    assert VLLM.changes(served(tensor=8), served(tensor=4, replicate=2, expert=8, compiled=False)) == (
        "--data-parallel-size 2",
        "--tensor-parallel-size 4",
        "--enable-expert-parallel",
        "--enforce-eager",
    )
