"""accelerate's YAML: published files, files with faults, and launches written and read again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launches import DEGREES, SCRIPT, check_round_trip, launches, recipe

from api.frameworks.configurations.accelerate import ACCELERATE
from api.frameworks.launch import Launch
from planner.errors import JobError

DTYPES = st.sampled_from(("bf16", "fp16", "fp32", "fp8"))
OPTIMIZERS = st.sampled_from(("adamw", "adamw-8bit", "adamw-8bit-bnb", "adafactor", "adagrad", "sgd"))
DEGREES_ABOVE_1 = st.sampled_from((2, 3, 4, 8))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accelerate_tp_hsdp", Launch(replicate=2, shard=2, zero=3, tensor=2)),
        ("accelerate_cp", Launch(zero=3, context=8, checkpointing="full")),
        ("accelerate_fsdp1", Launch(shard=2, zero=3)),
        ("accelerate_multi_node", Launch(replicate=8, dtype="fp32")),
        ("trl_fsdp2", Launch(shard=8, zero=3)),
        ("trl_deepspeed_zero2", Launch(shard=8, zero=2)),
        ("trl_deepspeed_zero3", Launch(shard=8, zero=3)),
        ("trl_ulysses", Launch(shard=2, zero=3, context=2)),
        ("trl_multi_gpu", Launch(replicate=8)),
    ],
)
def test_published_files_are_read(name: str, expected: Launch) -> None:
    reading = recipe(ACCELERATE, name)
    assert reading.faults == ()
    assert reading.launch == expected


def test_a_file_that_names_a_file_of_deepspeed_says_so() -> None:
    reading = recipe(ACCELERATE, "accelerate_deepspeed_file")
    assert reading.faults == ()
    assert any("zero_stage1_config.json: ZeRO stage 2 is taken" in text for text in reading.assumed)


def test_faults_are_named_all_at_once() -> None:
    text = """
distributed_type: FSDP
mixed_precision: no
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_shard_strategy: FULL_SHARD
  fsdp_sync_module_states: false
parallelism_config:
  parallelism_config_dp_replicate_size: 4
  parallelism_config_tp_size: 4
"""
    assert set(ACCELERATE.read(text, 8).faults) == {
        "mixed_precision no is false in YAML, which accelerate does not take: 'no' would do",
        "num_processes 16 is not the cluster's 8 devices: 8 would do",
        "fsdp_config.fsdp_shard_strategy is not a key of accelerate 1.15.0 (the closest is "
        "fsdp_config.fsdp_sharding_strategy)",
        "fsdp_config.fsdp_sync_module_states false does not run with fsdp_cpu_ram_efficient_loading true: true would "
        "do",
        "parallelism_config_dp_replicate_size 4 x parallelism_config_tp_size 4 is 16 processes, not the 8 of the "
        "cluster: a product of 8 would do",
        "parallelism_config_dp_replicate_size 4 does not run with parallelism_config_tp_size or "
        "parallelism_config_cp_size above 1 where parallelism_config_dp_shard_size is 1: "
        "parallelism_config_dp_shard_size 4 and parallelism_config_dp_replicate_size 1 would do",
    }


FSDP2 = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
DDP = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n"
DEEPSPEED = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
SIZE = "parallelism_config:\n  parallelism_config_{}_size: {}\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("mixed_precision: bf16\n", "distributed_type has to be given"),
        (DDP + "fsdp_version: 2\n", "fsdp_version is not a key of accelerate 1.15.0 (the closest is fsdp_config."),
        (DDP.replace("MULTI_GPU", "GPUS"), "distributed_type GPUS is not one of NO, MULTI_GPU"),
        (DDP.replace("MULTI_GPU", "NO").replace("8", "1"), "distributed_type NO runs 1 process"),
        (DDP + "num_machines: 3\n", "num_machines 3 does not divide 8 devices (1, 2, 4 or 8 would do)"),
        (DDP + SIZE.format("dp_shard", 8), "parallelism_config_dp_shard_size or parallelism_config_cp_size above 1"),
        (FSDP2.replace("fsdp_version: 2", "fsdp_version: 1") + SIZE.format("dp_shard", 8), "parallelism_config needs"),
        (FSDP2 + SIZE.format("tp", 8), "parallelism_config_dp_shard_size 1 leaves FSDP nothing to shard over"),
        (FSDP2 + "  fsdp_reshard_after_forward: FULL_SHARD\n", "fsdp_config.fsdp_reshard_after_forward FULL_SHARD is"),
        (FSDP2 + "  fsdp_activation_checkpointing_offload: true\n", "fsdp_config.fsdp_activation_checkpointing_off"),
        (DEEPSPEED + SIZE.format("tp", 2), "parallelism_config.parallelism_config_tp_size 2 does not run with"),
        (DEEPSPEED + "deepspeed_config: {zero_stage: 5}\n", "deepspeed_config.zero_stage 5 is not 0, 1, 2 or 3"),
        (
            DEEPSPEED + "deepspeed_config: {deepspeed_config_file: ds.json, zero_stage: 3}\n",
            "deepspeed_config.zero_stage is ignored beside deepspeed_config_file: give it in ds.json",
        ),
    ],
)
def test_one_fault(text: str, fault: str) -> None:
    faults = ACCELERATE.read(text, 8).faults
    assert len(faults) == 1
    assert faults[0].startswith(fault)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("SHARD_GRAD_OP", Launch(shard=8, zero=3, reshard_after_forward=False)),
        ("2", Launch(shard=8, zero=3, reshard_after_forward=False)),
        ("NO_SHARD", Launch(replicate=8)),
        ("HYBRID_SHARD", Launch(replicate=2, shard=4, zero=3)),
    ],
)
def test_strategies_of_fsdp1(strategy: str, expected: Launch) -> None:
    text = f"{FSDP2.replace('fsdp_version: 2', f'fsdp_sharding_strategy: {strategy}')}num_machines: 2\n"
    assert ACCELERATE.read(text, 8).launch == expected


def test_keys_of_a_section_may_lack_their_prefix() -> None:
    text = FSDP2 + "  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  activation_checkpointing: true\n"
    reading = ACCELERATE.read(text, 8)
    assert reading.faults == ()
    assert reading.launch.checkpointing == "full"


@pytest.mark.parametrize("text", ["distributed_type: [FSDP\nnum", "- FSDP", "a: b: c"])
def test_text_that_cannot_be_parsed(text: str) -> None:
    with pytest.raises(JobError, match="not valid"):
        ACCELERATE.read(text, 8)


def test_a_syntax_error_has_its_place() -> None:
    with pytest.raises(JobError, match="line 1, column 5"):
        ACCELERATE.read("a: b: c", 8)


@given(launch=launches(**SCRIPT, replicate=DEGREES, dtype=DTYPES, optimizer=OPTIMIZERS, compiled=st.booleans()))
def test_replicas_are_written_and_read_again(launch: Launch) -> None:
    check_round_trip(ACCELERATE, launch)


@given(launch=launches(**SCRIPT, tensor=DEGREES_ABOVE_1, dtype=DTYPES))
def test_tensor_parallelism_is_written_and_read_again(launch: Launch) -> None:
    check_round_trip(ACCELERATE, launch)


@given(launch=launches(**SCRIPT, zero=st.sampled_from((1, 2)), shard=DEGREES, dtype=DTYPES, offload=st.booleans()))
def test_zero_is_written_and_read_again(launch: Launch) -> None:
    check_round_trip(ACCELERATE, launch)


@given(
    launch=launches(
        **SCRIPT,
        zero=st.just(3),
        replicate=DEGREES,
        shard=DEGREES_ABOVE_1,
        context=DEGREES,
        tensor=DEGREES,
        dtype=DTYPES,
        optimizer=OPTIMIZERS,
        compiled=st.booleans(),
        offload=st.booleans(),
        reshard_after_forward=st.booleans(),
    )
)
def test_fsdp_is_written_and_read_again(launch: Launch) -> None:
    check_round_trip(ACCELERATE, launch)


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (Launch(pipeline=2), "pipeline 2 cannot be said"),
        (Launch(replicate=4, tensor=2), "replicas of 1 shard with tensor or context parallelism"),
        (Launch(shard=4, tensor=2, zero=1), "tensor parallelism with ZeRO stage 1"),
        (Launch(zero=3), "ZeRO stage 3 over 1 rank"),
        (Launch(shard=8, zero=3, optimizer="muon"), "the optimizer muon"),
        (Launch(context=8), "context parallelism without FSDP"),
    ],
)
def test_launches_that_cannot_be_said_are_refused(launch: Launch, reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        ACCELERATE.write(launch, "Llama-3.1-8B")


def test_what_differs_is_said() -> None:
    before = Launch(shard=8, zero=3, micro_batch=1, batch=64)
    after = replace(before, shard=4, tensor=2, checkpointing="full", micro_batch=4, reshard_after_forward=False)
    assert ACCELERATE.changes(before, after) == (
        "parallelism_config.parallelism_config_dp_shard_size: 4",
        "parallelism_config.parallelism_config_tp_size: 2",
        "per_device_train_batch_size: 4",
        "gradient_accumulation_steps: 4",
        "fsdp_config.fsdp_activation_checkpointing: true",
        "fsdp_config.fsdp_reshard_after_forward: false",
    )


def test_fsdp2_holds_float32_parameters_and_reduces_in_16_bits() -> None:
    implementation = ACCELERATE.implementation(Launch(shard=8, zero=3), "sm90")
    assert implementation.state.parameter_nbytes == 4
    assert implementation.data_parallel.reduce_nbytes == 2
    assert ACCELERATE.implementation(Launch(shard=8, zero=2), "sm90").state.master_nbytes == 4
