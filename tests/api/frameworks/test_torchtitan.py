"""torchtitan's command lines and TOML files, read and written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.frameworks.configurations.torchtitan import TORCHTITAN
from api.frameworks.launch import Launch
from planner.errors import JobError

RECIPES = Path(__file__).parent / "recipes"

FSDP = Launch(zero=3, sequence_parallel=False, seq=8192)
TP = replace(FSDP, tensor=8, sequence_parallel=True)


@pytest.mark.parametrize(
    ("name", "devices", "launch"),
    [
        ("llama3_70b.toml", 64, replace(TP, shard=8, micro_batch=8, checkpointing="full")),
        ("llama3_70b_2025.toml", 64, replace(TP, shard=8, micro_batch=8, checkpointing="full")),
        (
            "llama3_405b.toml",
            128,
            replace(TP, shard=16, micro_batch=2, checkpointing="full", dtype="fp8", compiled=True),
        ),
        (
            "llama3_405b_2024.toml",
            512,
            replace(
                TP,
                shard=8,
                pipeline=8,
                virtual_stages=2,
                micro_batch=4,
                batch=256,
                checkpointing="full",
                dtype="fp8",
                compiled=True,
                reshard_after_forward=False,
            ),
        ),
        (
            "llama3_405b_cp_2024.toml",
            512,
            replace(
                TP,
                shard=4,
                context=2,
                pipeline=8,
                micro_batch=1,
                batch=32,
                seq=65536,
                checkpointing="full",
                dtype="fp8",
                compiled=True,
                reshard_after_forward=False,
            ),
        ),
        ("llama3_8b_h100.sh", 8, replace(FSDP, shard=8, micro_batch=2, batch=16, checkpointing="selective")),
        (
            "llama3_8b_compile_h100.sh",
            128,
            replace(FSDP, shard=128, micro_batch=2, checkpointing="selective", compiled=True),
        ),
        ("llama3_70b_h100.sh", 256, replace(TP, shard=32, micro_batch=16, checkpointing="full", compiled=True)),
        ("llama3_8b_tp_h100.sh", 64, replace(TP, shard=8, micro_batch=12, checkpointing="selective", compiled=True)),
    ],
)
def test_published_recipes_are_read(name: str, devices: int, launch: Launch) -> None:
    text = (RECIPES / f"torchtitan_{name}").read_text()
    assert TORCHTITAN.recognises(text)
    reading = TORCHTITAN.read(text, devices)
    assert reading.launch == launch
    assert reading.faults == ()
    assert reading.sizes["layers"][0] in (32, 80, 126)


def test_every_fault_is_named_at_once() -> None:
    text = """--module llama3 --config llama3_8b \\
        --training.sequence_length 4096 \\
        --parallelism.data_parallel_shard_degree 3 \\
        --parallelism.tensor_parallel_degree 4 \\
        --parallelism.pipeline_parallel_degree 2 \\
        --training.local_batch_size 6 --parallelism.pipeline_parallel_microbatch_size 4 \\
        --training.global_batch_size 20 \\
        --parallelism.pipeline_parallel_schedule 2F2B \\
        --parallelism.expert_parallel_degree 3 \\
        --compile.enable_async_tensor_parallel"""
    faults = TORCHTITAN.read(text, 32).faults
    starts = [
        "training.sequence_length is not a key of torchtitan (the closest is training.seq_len)",
        "parallelism.data_parallel_shard_degree 3 x parallelism.tensor_parallel_degree 4 x "
        "parallelism.pipeline_parallel_degree 2 is 24, and there are 32 devices "
        "(parallelism.data_parallel_shard_degree 4 or -1 would do)",
        "parallelism.pipeline_parallel_schedule 2F2B is not one of 1F1B, GPipe",
        "parallelism.pipeline_parallel_microbatch_size 4 does not divide training.local_batch_size 6 (1, 2, 3 or 6",
        "training.global_batch_size 20 is no multiple of training.local_batch_size 6 x 4 data-parallel ranks (24 would",
        "parallelism.expert_parallel_degree 3 does not divide 16 ranks",
        "compile.enable_async_tensor_parallel needs compile.enable",
        "parallelism.pipeline_parallel_degree 2 needs --training.disable_cuda_graphs",
    ]
    for start in starts:
        assert any(fault.startswith(start) for fault in faults), (start, faults)


def test_toml_that_is_invalid_is_refused_with_its_place() -> None:
    with pytest.raises(JobError, match="line 2, column"):
        TORCHTITAN.read("[training]\nlocal_batch_size = = 2\n", 8)


def test_stages_per_rank_follow_from_layers_per_stage() -> None:
    flags = (
        "--module llama3 --config llama3_405b --training.disable_cuda_graphs --training.local_batch_size 8 "
        "--parallelism.pipeline_parallel_degree 8 --parallelism.pipeline_parallel_schedule Interleaved1F1B "
        "--parallelism.pipeline_parallel_layers_per_stage {}"
    )
    assert TORCHTITAN.read(flags.format(4), 64).launch.virtual_stages == 4
    (fault,) = TORCHTITAN.read(flags.format(20), 64).faults
    assert fault.endswith("(1, 2, 4 or 8 would do)")


def test_what_is_not_priced_is_said() -> None:
    text = (
        "--config llama3_8b --training.enable_cpu_offload --training.dtype bfloat16 --training.no-disable-cuda-graphs"
    )
    reading = TORCHTITAN.read(text, 8)
    assert reading.launch.offload
    assert [text.partition(" ")[0].rstrip(":") for text in reading.unpriced] == [
        "training.enable_cpu_offload",
        "training.dtype",
    ]


def test_experts_are_split_by_tensor_ranks_where_they_are_not_spread() -> None:
    whole = TORCHTITAN.read("--config gpt_oss_20b --parallelism.tensor_parallel_degree 2", 8).launch
    spread = TORCHTITAN.read("--config deepseek_v3_16b --parallelism.tensor_parallel_degree 2", 8).launch
    assert (whole.expert, whole.expert_tensor) == (1, 2)
    assert (spread.expert, spread.expert_tensor) == (8, 1)


MODELS = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-405B", "Qwen/Qwen3-32B", "org/other-7B")


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    """Return a launch that torchtitan can say."""
    powers = st.sampled_from((1, 2, 4))
    replicate, shard, context, tensor, pipeline = (draw(powers) for _ in range(5))
    sharded = shard * context > 1
    virtual = draw(st.sampled_from((1, 2))) if pipeline > 1 else 1
    schedules = ("1f1b", "gpipe", "zero-bubble") if virtual > 1 else ("1f1b", "gpipe") if pipeline > 1 else ("1f1b",)
    micro_batch, steps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Launch(
        replicate=replicate,
        shard=shard,
        zero=3 if sharded else 0,
        tensor=tensor,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        pipeline=pipeline,
        virtual_stages=virtual,
        schedule=draw(st.sampled_from(schedules)),
        context=context,
        expert=draw(st.sampled_from([each for each in (1, 2, 4) if shard * context * tensor % each == 0])),
        micro_batch=micro_batch,
        batch=draw(st.sampled_from((None, micro_batch * steps * replicate * shard))),
        seq=draw(st.sampled_from((2048, 8192))),
        checkpointing=draw(st.sampled_from(("none", "selective", "full"))),
        dtype=draw(st.sampled_from(("bf16", "fp8", "fp4"))),
        compiled=draw(st.booleans()),
        reshard_after_forward=draw(st.booleans()),
        offload=draw(st.booleans()),
    )


@given(launches(), st.sampled_from(MODELS))
def test_what_is_written_is_read_back(launch: Launch, model: str) -> None:
    text = TORCHTITAN.write(launch, model)
    assert TORCHTITAN.recognises(text)
    reading = TORCHTITAN.read(text, launch.ranks)
    assert reading.launch == launch
    assert (reading.faults, reading.version) == ((), TORCHTITAN.version)


@given(launches(), launches())
def test_a_change_says_every_field_that_differs(before: Launch, after: Launch) -> None:
    texts = TORCHTITAN.changes(before, after)
    if before.tensor != after.tensor:
        assert f"--parallelism.tensor_parallel_degree {after.tensor}" in texts
    if before.checkpointing != after.checkpointing:
        assert f"activation-checkpoint:{after.checkpointing}" in texts


def test_a_pipeline_changes_the_local_batch_too() -> None:
    before = replace(FSDP, shard=8, micro_batch=2, batch=64)
    texts = TORCHTITAN.changes(before, replace(before, shard=2, pipeline=4))
    assert "--training.disable_cuda_graphs" in texts
    assert "--training.local_batch_size 32" in texts
    assert "--parallelism.pipeline_parallel_microbatch_size 2" in texts
    assert "--parallelism.fsdp_reshard_after_forward always" in texts


@pytest.mark.parametrize(
    "change",
    [{"zero": 2}, {"checkpointing": "attention"}, {"optimizer": "muon"}, {"schedule": "interleaved"}, {"seq": None}],
)
def test_what_torchtitan_cannot_say_is_refused(change: dict[str, object]) -> None:
    launch = replace(Launch(shard=8, zero=3, seq=8192), **change)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="torchtitan"):
        TORCHTITAN.write(launch, "org/model")


def test_implementation_follows_the_launch() -> None:
    plain = TORCHTITAN.implementation(Launch(), "sm90")
    piped = TORCHTITAN.implementation(Launch(pipeline=4, reshard_after_forward=False, compiled=True), "sm100")
    assert plain.kernels.host_ops_per_layer == 0
    assert piped.kernels.host_ops_per_layer > 0
    assert piped.pipeline.preallocates_receives
    assert not piped.data_parallel.reshard_after_forward
    assert not piped.kernels.torch_ring_attention
    assert plain.loss.chunks == 8
