"""Overrides of Megatron-Bridge, read and written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.frameworks.configurations.bridge import MEGATRON_BRIDGE
from api.frameworks.launch import Launch
from planner.errors import JobError

RECIPES = Path(__file__).parent / "recipes"
USUAL = Launch(zero=1, compiled=True)
LLAMA3_70B = replace(
    USUAL,
    shard=2,
    tensor=4,
    sequence_parallel=True,
    pipeline=4,
    virtual_stages=5,
    context=2,
    batch=512,
    seq=8192,
)
FP8 = replace(USUAL, dtype="fp8", seq=4096)


@pytest.mark.parametrize(
    ("name", "devices", "launch"),
    [
        ("llama3_70b_recipe.sh", 64, LLAMA3_70B),
        ("llama3_70b_h100_fp8.sh", 64, replace(LLAMA3_70B, pipeline=8, context=1, batch=256, dtype="fp8")),
        (
            "llama31_405b_h100_fp8.sh",
            1024,
            replace(LLAMA3_70B, shard=8, tensor=8, pipeline=8, virtual_stages=8, batch=1536, dtype="fp8"),
        ),
        (
            "qwen3_30b_a3b_h100_fp8.sh",
            16,
            replace(FP8, shard=8, pipeline=2, virtual_stages=12, expert=8, batch=1024),
        ),
        (
            "qwen3_235b_a22b_h100_fp8.sh",
            256,
            replace(
                FP8, shard=16, tensor=2, sequence_parallel=True, pipeline=8, virtual_stages=4, expert=32, batch=8192
            ),
        ),
        ("llama3_70b_gb300_fsdp.yaml", 64, replace(FP8, shard=64, zero=3, micro_batch=2, batch=256, seq=8192)),
    ],
)
def test_published_recipes_are_read(name: str, devices: int, launch: Launch) -> None:
    text = (RECIPES / f"bridge_{name}").read_text()
    assert MEGATRON_BRIDGE.recognises(text)
    reading = MEGATRON_BRIDGE.read(text, devices)
    assert reading.launch == launch
    assert reading.faults == ()


def test_assignments_in_python_are_read() -> None:
    text = """
def my_pretrain_config():
    cfg = _pretrain_common()
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.sequence_parallel = True  # with tensor parallelism
    # cfg.model.context_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.train.micro_batch_size = 2
    cfg.mixed_precision = bf16_with_mxfp8_mixed()
"""
    launch = MEGATRON_BRIDGE.read(text, 8).launch
    assert launch == Launch(
        replicate=2, tensor=4, sequence_parallel=True, micro_batch=2, dtype="fp8", compiled=True, seq=None
    )


def test_every_fault_is_named_at_once() -> None:
    text = """model.tensor_model_parallel_size=1 model.sequence_parallel=true model.pipeline_model_parallel_size=2
        model.virtual_pipeline_model_parallel_size=2 train.micro_batch_size=2 train.global_batch_size=20
        model.contxt_parallel_size=2 model.expert_model_parallel_size=3 model.recompute_granularity=full
        ddp.overlap_param_gather=true ddp.use_distributed_optimizer=false"""
    faults = MEGATRON_BRIDGE.read(text, 16).faults
    starts = [
        "model.contxt_parallel_size is not a key of Megatron-Bridge (the closest is model.context_parallel_size)",
        "model.expert_model_parallel_size 3 does not divide the 8 ranks of a pipeline stage (1, 2, 4 or 8 would do)",
        "train.global_batch_size 20 is no multiple of train.micro_batch_size 2 x 8 data-parallel ranks (16 or 32",
        "model.sequence_parallel needs model.tensor_model_parallel_size of 2 or more",
        "train.global_batch_size gives 1 micro-batch,",
        "ddp.overlap_param_gather needs ddp.use_distributed_optimizer",
        "model.recompute_granularity full needs model.recompute_method",
        "model.recompute_granularity full needs model.recompute_num_layers",
    ]
    for start in starts:
        assert any(fault.startswith(start) for fault in faults), (start, faults)
    assert len(faults) == len(starts)


def test_a_text_without_overrides_is_refused() -> None:
    with pytest.raises(JobError, match="no override"):
        MEGATRON_BRIDGE.read("echo hello", 8)
    with pytest.raises(JobError, match="YAML at line 3, column 1"):
        MEGATRON_BRIDGE.read("model:\n  a: [1\n", 8)


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    """Return a launch that Megatron-Bridge can say."""
    powers = st.sampled_from((1, 2, 4))
    data, context, tensor, pipeline = (draw(powers) for _ in range(4))
    zero = draw(st.sampled_from((0, 1, 2, 3)))
    replicate = draw(st.sampled_from([each for each in (1, 2, 4) if data % each == 0])) if zero else data
    virtual = draw(st.sampled_from((1, 2, 5))) if pipeline > 1 else 1
    steps = draw(st.integers(1, 4)) * (pipeline if virtual > 1 else 1)
    micro_batch = draw(st.integers(1, 4))
    return Launch(
        replicate=replicate,
        shard=data // replicate,
        zero=zero,
        tensor=tensor,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        pipeline=pipeline,
        virtual_stages=virtual,
        context=context,
        expert=draw(st.sampled_from([each for each in (1, 2, 4) if data * context * tensor % each == 0])),
        micro_batch=micro_batch,
        batch=micro_batch * steps * data,
        seq=draw(st.sampled_from((2048, 8192))),
        checkpointing=draw(st.sampled_from(("none", "attention", "full"))),
        dtype=draw(st.sampled_from(("bf16", "fp16", "fp8", "fp4"))),
        optimizer=draw(st.sampled_from(("adamw", "sgd-momentum"))),
        compiled=True,
        offload=draw(st.booleans()),
    )


@given(
    launches(), st.sampled_from(("meta-llama/Meta-Llama-3-70B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "o/m"))
)
def test_what_is_written_is_read_back(launch: Launch, model: str) -> None:
    text = MEGATRON_BRIDGE.write(launch, model)
    assert MEGATRON_BRIDGE.recognises(text)
    reading = MEGATRON_BRIDGE.read(text, launch.ranks)
    assert reading.launch == launch
    assert (reading.faults, reading.version) == ((), MEGATRON_BRIDGE.version)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("meta-llama/Llama-3.1-8B", "llama31_8b_pretrain_config"),
        ("meta-llama/Meta-Llama-3-70B", "llama3_70b_pretrain_config"),
        ("Qwen/Qwen3-30B-A3B", "qwen3_30b_a3b_pretrain_config"),
        ("org/other", "RECIPE"),
    ],
)
def test_a_models_own_recipe_is_taken(model: str, recipe: str) -> None:
    assert f"--recipe {recipe} " in MEGATRON_BRIDGE.write(LLAMA3_70B, model)


def test_collectives_of_tensor_parallelism_overlap() -> None:
    assert MEGATRON_BRIDGE.implementation(LLAMA3_70B, "sm90").tensor_parallel.async_tp
    assert not MEGATRON_BRIDGE.implementation(USUAL, "sm90").tensor_parallel.async_tp
