"""`check`: every fault at once, fits, the largest micro-batch, changes that help, and the plans beside them."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from api.frameworks.as_plan import NotAPlan, baseline_of, request_of
from api.frameworks.changes import HEADROOM, best_launch, helpful_changes, largest_micro_batch
from api.frameworks.check import check
from api.frameworks.launch import Launch
from api.frameworks.pricing import LaunchPricer
from api.frameworks.registry import NAMES, find_framework, framework_of
from api.render.check import check_lines
from api.requests.model_configs import find_config
from api.requests.price_configuration import transformer_of
from cost_model.hardware.cluster import ClusterSpec
from planner.errors import ClusterInputError, JobError, ModelError

MEGATRON = """\
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 128 --seq-length 8192
    --bf16 --use-distributed-optimizer --sequence-parallel
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""
CLUSTER = "8x8xh100-sxm-80gb"
TINY = {
    "hf_config": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 256,
    }
}


def pricer_of(framework: str, model: str, cluster: str, seq: int) -> LaunchPricer:
    config = find_config(model, allow_local=False)
    assert config is not None
    return LaunchPricer(
        framework=find_framework(framework),
        model=model,
        spec=transformer_of(config),
        cluster=ClusterSpec.parse(cluster),
        seq=seq,
    )


def test_a_legal_configuration_has_a_price_and_changes_that_pay() -> None:
    found = check("llama-3.1-70b", MEGATRON, cluster=CLUSTER, plans=False)
    assert found.framework.name == "megatron"
    assert not found.faults
    assert found.fits
    assert found.priced is not None
    assert found.priced.parallel.ranks == 64
    assert found.changes
    for change in found.changes:
        assert change.texts
        assert change.gain is not None
        assert change.priced.time.total_s == pytest.approx(found.priced.time.total_s * (1 - change.gain))
        assert change.launch.ranks == 64
        assert change.launch.global_batch == 128
    assert found.best is not None
    assert found.best.priced.time.total_s <= min(change.priced.time.total_s for change in found.changes)


def test_all_faults_come_at_once_with_legal_values() -> None:
    text = MEGATRON.replace("parallel-size 8", "parallel-size 7").replace("--sequence-parallel", "--sequnce-parallel")
    found = check("llama-3.1-70b", text + "    --num-layers 32\n", cluster=CLUSTER, plans=False)
    faults = " | ".join(found.faults)
    assert "--sequnce-parallel" in faults
    assert "--sequence-parallel" in faults
    assert "--num-layers 32 is not the model's, which is 80" in faults
    assert "does not divide 64 devices" in faults
    assert "--tensor-model-parallel-size 7 does not divide 64 heads (1, 2, 4, 8" in faults
    assert found.fits is None
    lines = check_lines(found)
    assert f"no: {len(found.faults)} faults" in " ".join(lines)
    assert all(len(line) <= 80 for line in lines)


def test_what_does_not_fit_says_how_much_is_missing_and_what_would_fit() -> None:
    text = MEGATRON.replace("--recompute-granularity full", "").replace("--micro-batch-size 1", "--micro-batch-size 8")
    text = text.replace("--recompute-method uniform --recompute-num-layers 1", "")
    found = check("llama-3.1-70b", text, cluster=CLUSTER, plans=False)
    assert found.fits is False
    assert found.largest_micro_batch is not None
    assert found.largest_micro_batch < 8
    assert found.changes
    assert all(change.gain is None and change.priced.fits for change in found.changes)
    printed = " ".join(check_lines(found))
    assert "are missing on each device" in printed
    assert "What would fit" in printed


@pytest.mark.parametrize("framework", [name for name in NAMES if name != "vllm"])
def test_every_change_can_be_written_and_read_again(framework: str) -> None:
    pricer = pricer_of(framework, "llama-3.1-8b", "1x8xh100-sxm-80gb", 4096)
    launch = Launch(shard=8, zero=3, micro_batch=1, batch=64, seq=4096, checkpointing="full")
    if not pricer.framework.can_write(launch):
        launch = dataclasses.replace(launch, zero=1)
    priced = pricer.price(launch)
    assert priced is not None
    changes = helpful_changes(pricer, launch, priced)
    assert changes
    for change in changes:
        assert pricer.is_legal(change.launch)
        assert change.priced.memory.device <= (1 - HEADROOM) * pricer.cluster.memory_bytes
        text = pricer.framework.write(change.launch, "llama-3.1-8b")
        again = pricer.framework.read(text, 8)
        assert not again.faults
        price = pricer.price(dataclasses.replace(again.launch, batch=again.launch.global_batch))
        assert price is not None
        assert price.time.total_s == pytest.approx(change.priced.time.total_s)


def test_the_best_launch_is_the_best_of_all_small_ones() -> None:
    """Against a search of all degrees, checkpointing modes and micro-batches of Megatron-LM on one node."""
    pricer = pricer_of("megatron", "llama-3.1-8b", "1x8xh100-sxm-80gb", 8192)
    start = Launch(shard=2, zero=1, tensor=4, micro_batch=1, batch=32, seq=8192, checkpointing="full", compiled=True)
    priced = pricer.price(start)
    assert priced is not None
    best = best_launch(pricer, start, priced)
    assert best is not None
    least = best.priced.time.total_s
    degrees = (1, 2, 4, 8)
    for tensor, pipeline, context in itertools.product(degrees, degrees, degrees):
        if 8 % (tensor * pipeline * context):
            continue
        for micro_batch, ac, sequence in itertools.product((1, 2, 4), ("none", "full"), (False, True)):
            other = dataclasses.replace(
                start,
                shard=8 // (tensor * pipeline * context),
                tensor=tensor,
                pipeline=pipeline,
                context=context,
                micro_batch=micro_batch,
                checkpointing=ac,
                sequence_parallel=sequence,
            )
            price = pricer.price(other) if pricer.is_legal(other) else None
            if price is not None and price.memory.device <= (1 - HEADROOM) * pricer.cluster.memory_bytes:
                assert least <= price.time.total_s * (1 + 1e-9)


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    pricer = pricer_of("torchtitan", "llama-3.1-8b", "1x8xh100-sxm-80gb", 8192)
    launch = Launch(shard=8, zero=3, micro_batch=1, batch=512, seq=8192, compiled=True, checkpointing="selective")
    largest = largest_micro_batch(pricer, launch)
    assert largest is not None
    for size, fits in ((largest, True), (2 * largest, False)):
        price = pricer.price(dataclasses.replace(launch, micro_batch=size))
        assert price is not None
        assert price.fits is fits


@pytest.mark.parametrize(("framework", "expert_tensor"), [("accelerate", 4), ("transformers", 4), ("megatron", 1)])
def test_tensor_ranks_split_experts_where_no_key_says_otherwise(framework: str, expert_tensor: int) -> None:
    pricer = pricer_of(framework, "mixtral-8x7b", "1x8xh100-sxm-80gb", 4096)
    assert pricer.parallel(Launch(shard=2, zero=3, tensor=4)).expert_tensor == expert_tensor


def test_the_layouts_are_planned_beside_the_best_plan() -> None:
    text = json.dumps(
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
        }
    )
    found = check(TINY, text, cluster="1x4xtoy", seq=32)
    assert found.plan is not None
    assert str(found.plan.mesh) == "fsdp=4"
    assert found.plan.micro_batches == 1
    assert found.best_plan is not None
    assert found.best_plan.estimate is not None
    assert found.plan.estimate is not None
    assert found.best_plan.estimate.step_time_s <= found.plan.estimate.step_time_s * (1 + 1e-3)
    assert "best plan" in " ".join(check_lines(found))
    json.dumps(found.to_dict())


def test_serving_is_priced_as_a_plan() -> None:
    text = "vllm serve tiny --tensor-parallel-size 2 --data-parallel-size 2 --max-num-seqs 4 --max-model-len 64"
    found = check(TINY, text, cluster="1x4xtoy", plans=False)
    assert (found.faults, found.fits, found.priced) == ((), None, None)
    found = check(TINY, text, cluster="1x4xtoy")
    assert found.fits
    assert found.plan is not None
    assert found.plan.job.phase == "decode"
    assert str(found.plan.mesh) == "dp=2,tp=2"


@pytest.mark.parametrize(
    ("launch", "baseline"),
    [
        (Launch(replicate=8), ("ddp", "dp=8")),
        (Launch(shard=8, zero=3), ("fsdp", "fsdp=8")),
        (Launch(replicate=2, shard=4, zero=3), ("hsdp", "dp=2,fsdp=4")),
        (Launch(shard=4, zero=3, tensor=2), ("fsdp-tp", "fsdp=4,tp=2")),
        (Launch(replicate=4, tensor=2), ("tp", "dp=4,tp=2")),
        (Launch(tensor=8), ("tp", "tp=8")),
    ],
)
def test_a_launch_has_the_layouts_of_a_baseline(launch: Launch, baseline: tuple[str, str]) -> None:
    assert baseline_of(launch) == baseline


@pytest.mark.parametrize(
    "launch",
    [
        Launch(pipeline=2),
        Launch(context=2, zero=3),
        Launch(shard=4, expert=2, zero=3),
        Launch(shard=4, zero=1),
        Launch(replicate=2, shard=2, zero=3, tensor=2),
        Launch(dtype="fp8"),
        Launch(checkpointing="attention"),
        Launch(offload=True),
    ],
)
def test_other_launches_say_why_they_are_no_plan(launch: Launch) -> None:
    assert isinstance(request_of(launch, "gpt2", "1x4xtoy", 32, None), NotAPlan)


def test_bad_input_is_one_clear_error() -> None:
    with pytest.raises(JobError, match="no framework 'torchtitn'"):
        check("gpt2", "", cluster="1x4xtoy", framework="torchtitn")
    with pytest.raises(JobError, match="no framework's configuration looks like this"):
        framework_of(None, "hello")
    with pytest.raises(ModelError):
        check("gpt-17", MEGATRON, cluster=CLUSTER)
    with pytest.raises(ClusterInputError):
        check("gpt2", MEGATRON, cluster="8x8xz100")
    with pytest.raises(JobError, match="length of a sequence"):
        check("gpt2", MEGATRON.replace("--seq-length 8192", ""), cluster=CLUSTER)
