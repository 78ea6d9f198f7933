"""Arguments of Megatron-LM, read and written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.frameworks.configurations.megatron import MEGATRON_LM
from api.frameworks.launch import Launch
from planner.errors import JobError

RECIPES = Path(__file__).parent / "recipes"
USUAL = Launch(compiled=True)


@pytest.mark.parametrize(
    ("name", "devices", "launch", "sizes"),
    [
        (
            "llama3_8b_fp8.sh",
            8,
            replace(USUAL, shard=8, zero=1, batch=128, seq=8192, dtype="fp8"),
            {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
        ),
        (
            "gpt3_175b.sh",
            1024,
            replace(USUAL, replicate=8, tensor=8, pipeline=16, batch=1536, seq=2048, dtype="fp16"),
            {"layers": 96, "hidden": 12288, "heads": 96},
        ),
        (
            "mixtral_8x7b.sh",
            32,
            replace(USUAL, shard=8, zero=1, pipeline=4, expert=8, batch=256, seq=4096),
            {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "experts": 8},
        ),
        (
            "fsdp_deepseek_v3.sh",
            256,
            replace(USUAL, shard=256, zero=3, expert=8, micro_batch=4, batch=2048, seq=4096, checkpointing="attention"),
            {"layers": 61, "hidden": 7168, "heads": 128, "ffn": 18432, "experts": 256},
        ),
    ],
)
def test_published_scripts_are_read(name: str, devices: int, launch: Launch, sizes: dict[str, int]) -> None:
    text = (RECIPES / f"megatron_{name}").read_text()
    assert MEGATRON_LM.recognises(text)
    reading = MEGATRON_LM.read(text, devices)
    assert reading.launch == launch
    assert reading.faults == ()
    assert {key: value for key, (value, _) in reading.sizes.items()} == sizes


def test_every_fault_is_named_at_once() -> None:
    text = """pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \\
        --expert-model-parallel-size 3 \\
        --num-layers 32 --num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 4 \\
        --micro-batch-size 2 --global-batch-size 30 --batch-size 4 --sequnce-parallel --tp-comm-overlap \\
        --recompute-granularity full --overlap-param-gather --bf16 --fp16 --ckpt-format torch"""
    faults = MEGATRON_LM.read(text, 64).faults
    starts = [
        "--batch-size is no longer an argument: --micro-batch-size would do",
        "--sequnce-parallel is not an argument of Megatron-LM (the closest is --sequence-parallel)",
        "--expert-model-parallel-size 3 needs --num-experts",
        "--expert-model-parallel-size 3 x --expert-tensor-parallel-size 4 does not divide the 32 ranks of a pipeline",
        "--global-batch-size 30 is no multiple of --micro-batch-size 2 x 8 data-parallel ranks (16 or 32 would do)",
        "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank exclude each other",
        "--global-batch-size gives 1 micro-batch, and virtual stages need a multiple of --pipeline-model-parallel-size",
        "--overlap-param-gather needs --use-distributed-optimizer",
        "--overlap-param-gather needs --overlap-grad-reduce",
        "--tp-comm-overlap needs --sequence-parallel",
        "--recompute-granularity full needs --recompute-method",
        "--recompute-granularity full needs --recompute-num-layers",
        "--fp16 and --bf16 exclude each other",
    ]
    for start in starts:
        assert any(fault.startswith(start) for fault in faults), (start, faults)
    assert len(faults) == len(starts)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (
            "--tensor-model-parallel-size 3 --pipeline-model-parallel-size 2",
            "--tensor-model-parallel-size 3 x --pipeline-model-parallel-size 2 is 6, which does not divide 8 devices "
            "(1, 2, 4 or 8 would do)",
        ),
        (
            "--use-torch-fsdp2 --use-distributed-optimizer --tensor-model-parallel-size 2",
            "--use-torch-fsdp2 does not run with --use-distributed-optimizer",
        ),
        (
            "--use-megatron-fsdp --ckpt-format torch_dist --micro-batch-size 1",
            "--ckpt-format torch_dist does not run with --use-megatron-fsdp (fsdp_dtensor would do)",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank 2 needs --pipeline-model-parallel-size of 2 or more",
        ),
        (
            "--tensor-model-parallel-size 2 --num-experts 8",
            "--tensor-model-parallel-size 2 with --num-experts needs --sequence-parallel",
        ),
        (
            "--recompute-activations --recompute-method uniform",
            "--recompute-method does not go with --recompute-granularity selective",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers 32 --num-layers-per-virtual-pipeline-stage 3",
            "--num-layers-per-virtual-pipeline-stage 3 does not divide the 16 layers of a pipeline rank "
            "(1, 2, 4, 8 or 16 would do)",
        ),
        ("--micro-batch-size $MBS", "--micro-batch-size $MBS is not a whole number of 1 or more"),
    ],
)
def test_a_fault_names_the_argument_and_what_would_do(flags: str, fault: str) -> None:
    assert fault in MEGATRON_LM.read(flags, 8).faults


def test_a_text_without_arguments_is_refused() -> None:
    with pytest.raises(JobError, match="no argument of Megatron-LM"):
        MEGATRON_LM.read("echo hello", 8)


def test_sequence_parallelism_without_tensor_parallelism_is_left_out_as_megatron_does() -> None:
    reading = MEGATRON_LM.read("--sequence-parallel --micro-batch-size 1", 8)
    assert not reading.launch.sequence_parallel
    assert reading.faults == ()
    assert "--sequence-parallel has no effect with --tensor-model-parallel-size 1" in reading.assumed


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    """Return a launch that Megatron can say."""
    powers = st.sampled_from((1, 2, 4))
    data, context, tensor, pipeline = (draw(powers) for _ in range(4))
    zero = draw(st.sampled_from((0, 1, 2, 3)))
    replicate = draw(st.sampled_from([each for each in (1, 2, 4) if data % each == 0])) if zero else data
    virtual = draw(st.sampled_from((1, 2, 3))) if pipeline > 1 else 1
    width = draw(st.sampled_from((1, tensor)))
    micro_batch, steps = draw(st.integers(1, 4)), draw(st.integers(1, 4)) * (pipeline if virtual > 1 else 1)
    batch = micro_batch * steps * data
    return Launch(
        replicate=replicate,
        shard=data // replicate,
        zero=zero,
        tensor=tensor,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        pipeline=pipeline,
        virtual_stages=virtual,
        context=context,
        expert=draw(st.sampled_from([each for each in (1, 2, 4) if data * context * tensor // width % each == 0])),
        expert_tensor=width,
        micro_batch=micro_batch,
        batch=batch if virtual > 1 else draw(st.sampled_from((None, batch))),
        seq=draw(st.sampled_from((2048, 8192))),
        checkpointing=draw(st.sampled_from(("none", "attention", "full"))),
        dtype=draw(st.sampled_from(("bf16", "fp16", "fp8", "fp4", "fp32"))),
        optimizer=draw(st.sampled_from(("adamw", "sgd-momentum"))),
        compiled=True,
        offload=draw(st.booleans()),
    )


@given(launches())
def test_what_is_written_is_read_back(launch: Launch) -> None:
    text = MEGATRON_LM.write(launch, "org/model")
    assert MEGATRON_LM.recognises(text)
    reading = MEGATRON_LM.read(text, launch.ranks)
    assert reading.launch == launch
    assert (reading.faults, reading.version) == ((), MEGATRON_LM.version)


def test_a_change_of_checkpointing_gives_all_arguments() -> None:
    texts = MEGATRON_LM.changes(USUAL, replace(USUAL, checkpointing="full"))
    assert texts == ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1")


def test_data_parallel_ranks_need_no_argument() -> None:
    before = replace(USUAL, replicate=8)
    assert MEGATRON_LM.changes(before, replace(before, replicate=4, tensor=2)) == ("--tensor-model-parallel-size 2",)


@pytest.mark.parametrize("change", [{"checkpointing": "selective"}, {"schedule": "gpipe"}, {"optimizer": "adagrad"}])
def test_what_megatron_cannot_say_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(JobError, match="Megatron-LM"):
        MEGATRON_LM.write(replace(USUAL, **change), "org/model")  # type: ignore[arg-type]


def test_implementation_is_that_of_the_defaults() -> None:
    made = MEGATRON_LM.implementation(USUAL, "sm90")
    assert (made.data_parallel.reduce_nbytes, made.state.gradient_nbytes, made.state.master_nbytes) == (4, 4, 4)
    assert not made.tensor_parallel.async_tp
    assert MEGATRON_LM.implementation(USUAL, "sm80").kernels.attention == "flash2"
