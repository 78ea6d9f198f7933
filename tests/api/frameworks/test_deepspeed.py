"""DeepSpeed's JSON: published files, files with faults, and launches written and read again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launches import DEGREES, SCRIPT, check_round_trip, launches, recipe

from api.frameworks.configurations.deepspeed import DEEPSPEED
from api.frameworks.launch import Launch, Reading
from planner.errors import JobError


def read(document: dict[str, Any], devices: int = 8) -> Reading:
    return DEEPSPEED.read(json.dumps(document), devices)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformers_ds_config_zero2", Launch(shard=8, zero=2)),
        ("transformers_ds_config_zero3", Launch(shard=8, zero=3)),
        ("axolotl_zero1", Launch(shard=8, zero=1)),
        ("axolotl_zero3_bf16", Launch(shard=8, zero=3)),
        ("axolotl_zero3_bf16_cpuoffload_all", Launch(shard=8, zero=3, offload=True)),
        ("deepspeed_llama_7b", Launch(shard=8, zero=2, micro_batch=4, batch=128)),
        ("deepspeed_llama_70b", Launch(shard=32, zero=3, micro_batch=1, batch=256)),
        ("deepspeed_autotp", Launch(shard=2, zero=2, tensor=4)),
        ("deepspeed_autoep_qwen3_5", Launch(shard=8, zero=1, expert=8, micro_batch=2)),
    ],
)
def test_published_files_are_read(name: str, expected: Launch) -> None:
    reading = recipe(DEEPSPEED, name)
    assert reading.faults == ()
    assert reading.launch == expected


def test_a_published_file_that_this_version_refuses() -> None:
    faults = recipe(DEEPSPEED, "axolotl_zero1_torch_compile").faults
    assert [fault.split()[0] for fault in faults] == ["compile.disable", "compile.backend"]


def test_values_that_are_auto_are_said() -> None:
    reading = recipe(DEEPSPEED, "transformers_ds_config_zero3")
    assert "bf16.enabled auto: true is taken" in reading.assumed
    assert "train_micro_batch_size_per_gpu auto: 1 is taken" in reading.assumed


def test_what_is_not_priced_is_said() -> None:
    reading = recipe(DEEPSPEED, "deepspeed_llama_70b")
    assert [text.split(":")[0] for text in reading.unpriced] == [
        "communication_data_type",
        "optimizer.type OneBitAdam",
    ]
    offloaded = recipe(DEEPSPEED, "axolotl_zero3_bf16_cpuoffload_all")
    assert len(offloaded.unpriced) == 2


def test_faults_are_named_all_at_once() -> None:
    document = {
        "train_batch_size": 250,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "zero_optimization": {
            "stage": 2,
            "overlap_com": True,
            "mics_shard_size": 8,
            "offload_param": {"device": "cpu"},
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": True},
        "amp": {"enabled": True},
    }
    assert set(read(document).faults) == {
        "train_batch_size 250 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 8 x 8 devices: 256 "
        "would do",
        "zero_optimization.overlap_com is not a key of DeepSpeed 0.19.8 (the closest is "
        "zero_optimization.overlap_comm)",
        "zero_optimization.mics_shard_size was removed from DeepSpeed: zero_optimization.zero_hpz_partition_size would "
        "do",
        "zero_optimization.offload_param.device cpu needs zero_optimization.stage 3",
        "fp16.enabled and bf16.enabled are both true: one of them would do",
        "amp was removed from DeepSpeed: fp16, bf16 or torch_autocast would do",
    }


@pytest.mark.parametrize(
    ("batches", "micro_batch", "batch"),
    [
        ({"train_batch_size": 64}, 8, 64),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 2, 64),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 2, 64),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 2, 64),
        ({"train_micro_batch_size_per_gpu": 2}, 2, None),
    ],
)
def test_missing_batches_follow_from_the_others(batches: dict[str, int], micro_batch: int, batch: int | None) -> None:
    launch = read(batches).launch
    assert (launch.micro_batch, launch.batch) == (micro_batch, batch)


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({}, "train_batch_size or train_micro_batch_size_per_gpu has to be given"),
        (
            {"train_batch_size": 60},
            "train_batch_size 60 is not a multiple of gradient_accumulation_steps 1 x 8 devices",
        ),
        ({"train_batch_size": 64, "tensor_parallel": {"autotp_size": 3}}, "tensor_parallel.autotp_size 3 does not"),
        ({"train_batch_size": 64, "zero_optimization": {"stage": 4}}, "zero_optimization.stage 4 is not 0, 1, 2 or 3"),
        ({"train_batch_size": 64, "zero_optimization": 3}, "zero_optimization 3 is not a mapping"),
        (
            {"train_batch_size": 64, "expert_parallel": {"enabled": True, "autoep_size": 3}},
            "expert_parallel.autoep_size 3 x expert_tensor_parallel_size 1 does not divide 8 devices",
        ),
        (
            {"train_batch_size": 16, "sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}},
            "sequence_parallel_size 2 does not run with tensor_parallel.autotp_size 2",
        ),
        ({"train_batch_size": 64, "bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights"),
    ],
)
def test_one_fault(document: dict[str, Any], fault: str) -> None:
    faults = read(document).faults
    assert len(faults) == 1
    assert faults[0].startswith(fault)


@pytest.mark.parametrize("text", ['{"bf16": {\n"enabled" true}}', '{"bf16": {}, "bf16": {}}', "[]"])
def test_text_that_cannot_be_parsed(text: str) -> None:
    with pytest.raises(JobError, match="not valid"):
        DEEPSPEED.read(text, 8)


def test_a_syntax_error_has_its_place() -> None:
    with pytest.raises(JobError, match="line 2, column 11"):
        DEEPSPEED.read('{"bf16": {\n"enabled" true}}', 8)


@given(
    launch=launches(
        **SCRIPT,
        zero=st.just(0),
        replicate=DEGREES,
        tensor=DEGREES,
        dtype=st.sampled_from(("bf16", "fp16", "fp32")),
        optimizer=st.sampled_from(("adam", "adamw", "adagrad", "muon")),
        compiled=st.booleans(),
    )
)
def test_replicas_are_written_and_read_again(launch: Launch) -> None:
    check_round_trip(DEEPSPEED, launch)


@given(
    launch=launches(
        **SCRIPT,
        zero=st.sampled_from((1, 2, 3)),
        shard=DEGREES,
        context=DEGREES,
        offload=st.booleans(),
        dtype=st.sampled_from(("bf16", "fp16", "fp32")),
    ),
    expert=st.integers(1, 8),
)
def test_shards_are_written_and_read_again(launch: Launch, expert: int) -> None:
    expert = expert if launch.ranks % expert == 0 else 1
    check_round_trip(DEEPSPEED, replace(launch, expert=expert))


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (Launch(pipeline=2), "pipeline 2 cannot be said"),
        (Launch(replicate=2, shard=4, zero=3), "replicas of 4 shards"),
        (Launch(shard=8, zero=3, reshard_after_forward=False), "reshard_after_forward false cannot be said"),
        (Launch(shard=8, zero=3, micro_batch=3, batch=32), "a batch of 32, no multiple of 24"),
        (Launch(shard=8, zero=3, checkpointing="selective"), "selective checkpointing"),
        (Launch(phase="decode"), "phase decode"),
    ],
)
def test_launches_that_cannot_be_said_are_refused(launch: Launch, reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        DEEPSPEED.write(launch, "Llama-3.1-8B")


def test_what_differs_is_said() -> None:
    before = Launch(shard=8, zero=2, micro_batch=4, batch=64)
    after = replace(before, zero=3, micro_batch=2, offload=True, dtype="fp16")
    assert DEEPSPEED.changes(before, after) == (
        "zero_optimization.stage: 3",
        "train_micro_batch_size_per_gpu: 2",
        "gradient_accumulation_steps: 4",
        "bf16.enabled: false",
        "fp16.enabled: true",
        "zero_optimization.offload_optimizer.device: cpu",
    )


def test_states_are_those_of_mixed_precision() -> None:
    state = DEEPSPEED.implementation(Launch(shard=8, zero=2), "sm90").state
    assert (state.parameter_nbytes, state.gradient_nbytes, state.master_nbytes) == (2, 2, 4)
    whole = DEEPSPEED.implementation(Launch(shard=8, zero=2, dtype="fp32"), "sm90").state
    assert (whole.parameter_nbytes, whole.master_nbytes) == (4, 0)
