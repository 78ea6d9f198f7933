"""transformers' JSON: a published run, files with faults, and launches written and read again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launches import DEGREES, SCRIPT, check_round_trip, launches, recipe

from api.frameworks.configurations.transformers import TRANSFORMERS
from api.frameworks.launch import Launch, Reading
from planner.errors import JobError

STYLES = st.dictionaries(st.sampled_from(("layers.*.mlp", "lm_head")), st.sampled_from(("colwise", "rowwise")))
DTYPES = st.sampled_from(("bf16", "fp16", "fp32"))
OPTIMIZERS = st.sampled_from(("adamw", "adamw-8bit", "adamw-8bit-bnb", "adafactor", "adagrad", "sgd"))


def read(document: dict[str, Any], devices: int = 8) -> Reading:
    return TRANSFORMERS.read(json.dumps(document), devices)


def test_a_published_run_is_read() -> None:
    reading = recipe(TRANSFORMERS, "trl_glm_4_5_air")
    assert reading.faults == ()
    assert reading.launch == Launch(
        shard=2, zero=3, tensor=32, expert=32, micro_batch=1, seq=2048, tp_plan={}, dtype="bf16"
    )
    assert reading.unpriced == ("tp_plan {}: dense layers are priced as split by tp_size",)


def test_faults_are_named_all_at_once() -> None:
    document = {
        "tp_size": 4,
        "fsdp_size": 4,
        "dp_replicate_sise": 2,
        "ep_size": 6,
        "tp_plan": "automatic",
        "bf16": True,
        "fp16": True,
        "per_device_train_batch_size": 0,
    }
    assert set(read(document).faults) == {
        "dp_replicate_sise is not a key of transformers 5.24.0 (the closest is dp_replicate_size)",
        "fsdp_size 4 x tp_size 4 is 16 processes, not the cluster's 8 devices: fsdp_size 2 would do",
        "ep_size 6 is not a multiple of tp_size 4 that divides fsdp_size x tp_size 16: 4 or 8 or 16 would do",
        'tp_plan automatic is not "auto", a mapping of modules to styles, or null',
        "fp16 and bf16 are both true: one of them would do",
        "per_device_train_batch_size 0 is not a whole number of 1 or more",
    }


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"pp_size": 2, "fsdp_size": 4}, "pp_size 2 does not run with fsdp_size or dp_replicate_size above 1"),
        ({"tp_plan": "auto", "fsdp_size": 3}, "dp_replicate_size x fsdp_size x pp_size is 3, which does not divide"),
        ({"tp_size": "two", "fsdp_size": 8}, "tp_size two is not a whole number of 1 or more"),
        ({"fsdp_size": 8, "ep_plan": "auto"}, "ep_plan auto is not a mapping of modules to styles, or null"),
    ],
)
def test_one_fault(document: dict[str, Any], fault: str) -> None:
    faults = [text for text in read(document).faults if "processes, not" not in text]
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_tensor_parallelism_follows_from_the_devices_where_a_plan_is_given() -> None:
    assert read({"tp_plan": "auto", "fsdp_size": 2}).launch.tensor == 4


def test_without_sizes_the_trainer_runs_replicas() -> None:
    reading = read({"per_device_train_batch_size": 4})
    assert (reading.launch.replicate, reading.launch.zero) == (8, 0)
    assert any("data parallelism on 8 devices" in text for text in reading.assumed)


def test_defaults_are_said() -> None:
    reading = read({"fsdp_size": 8})
    assert reading.launch.micro_batch == 8
    assert "per_device_train_batch_size 8: the default" in reading.assumed


def test_a_nested_configuration_is_read() -> None:
    document = {"distributed_config": {"tp_size": 2, "fsdp_size": 4}, "max_length": 4096}
    launch = read(document).launch
    assert (launch.tensor, launch.shard, launch.seq) == (2, 4, 4096)


@given(
    launch=launches(
        **SCRIPT,
        zero=st.just(3),
        replicate=DEGREES,
        shard=st.sampled_from((2, 3, 4, 8)),
        tensor=DEGREES,
        dtype=DTYPES,
        optimizer=OPTIMIZERS,
        compiled=st.booleans(),
        offload=st.booleans(),
        reshard_after_forward=st.booleans(),
        tp_plan=st.one_of(st.none(), STYLES),
    ),
    spread=st.booleans(),
)
def test_fsdp_is_written_and_read_again(launch: Launch, spread: bool) -> None:
    expert = launch.shard * launch.tensor if spread else 1
    check_round_trip(TRANSFORMERS, replace(launch, expert=expert))


@given(launch=launches(**SCRIPT, replicate=DEGREES, tensor=DEGREES, dtype=DTYPES))
def test_replicas_are_written_and_read_again(launch: Launch) -> None:
    check_round_trip(TRANSFORMERS, launch)


@given(launch=launches(**SCRIPT, pipeline=DEGREES, tensor=DEGREES))
def test_pipelines_are_written_and_read_again(launch: Launch) -> None:
    check_round_trip(TRANSFORMERS, launch)


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (Launch(context=2), "context 2 cannot be said"),
        (Launch(pipeline=2, shard=2, zero=3), "pipelines with data parallelism"),
        (Launch(shard=8, zero=1), "ZeRO stage 1 of 8 shards"),
        (Launch(shard=4, zero=3, tensor=2, expert=3), "experts on 3 ranks"),
    ],
)
def test_launches_that_cannot_be_said_are_refused(launch: Launch, reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        TRANSFORMERS.write(launch, "Llama-3.1-8B")


def test_what_differs_is_said() -> None:
    before = Launch(shard=8, zero=3)
    after = Launch(shard=4, tensor=2, zero=3, compiled=True, reshard_after_forward=False)
    assert TRANSFORMERS.changes(before, after) == (
        "fsdp_size: 4",
        "tp_size: 2",
        "torch_compile: true",
        'fsdp_plan: {"model.layers.*": "keep_full_weight"}',
    )
