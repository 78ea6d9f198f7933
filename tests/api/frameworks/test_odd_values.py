"""No value of a configuration makes a reader raise, and what it reads has a price: its degrees are 1 or more."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.frameworks.configurations.accelerate import ACCELERATE
from api.frameworks.configurations.deepspeed import DEEPSPEED
from api.frameworks.configurations.documents import known_keys
from api.frameworks.configurations.transformers import TRANSFORMERS
from api.frameworks.configurations.vllm import VLLM
from api.frameworks.launch import Framework, Launch, Reading
from api.frameworks.registry import framework_of
from cost_model.configuration.implementation import Implementation
from planner.errors import JobError

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 64),
    st.floats(),
    st.sampled_from(("auto", "none", "", "8", "true", "FSDP", "DEEPSPEED", "MULTI_GPU", "NO", "cpu", "bf16", "2e8")),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(st.text(max_size=3), SCALARS, max_size=2))


def documents(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Return documents whose keys are known, with odd values in them and for whole sections."""
    keys = sorted(key.removesuffix(".*") for key in known_keys(name))
    entries = st.lists(st.tuples(st.sampled_from(keys), VALUES), min_size=1, max_size=12)
    return entries.map(_nested)


def _nested(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in entries:
        *sections, last = key.split(".")
        place = document
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[last] = value
    return document


def check(framework: Framework, reading: Reading) -> None:
    launch = reading.launch
    degrees = (launch.replicate, launch.shard, launch.tensor, launch.pipeline, launch.context, launch.expert)
    assert min(*degrees, launch.expert_tensor, launch.micro_batch) >= 1
    assert launch.zero in (0, 1, 2, 3)
    if launch.phase == "training":
        spec = launch.parallel(launch.seq or 1024, framework.implementation(launch, "sm90"))
        assert isinstance(spec.implementation, Implementation)
    assert all(text and text == text.strip() for text in (*reading.faults, *reading.unpriced, *reading.assumed))


@given(document=documents("accelerate"))
def test_accelerate(document: dict[str, Any]) -> None:
    check(ACCELERATE, ACCELERATE.read(json.dumps(document), 8))


@given(document=documents("deepspeed"))
def test_deepspeed(document: dict[str, Any]) -> None:
    check(DEEPSPEED, DEEPSPEED.read(json.dumps(document), 8))


@given(document=documents("transformers"))
def test_transformers(document: dict[str, Any]) -> None:
    check(TRANSFORMERS, TRANSFORMERS.read(json.dumps(document), 8))


@given(
    flags=st.lists(
        st.tuples(
            st.sampled_from(sorted(known_keys("vllm"))),
            st.sampled_from(("", "0", "-1", "2", "3.5", "auto", "x", "4k", "'a b'", "--help", "1e9", "none")),
        ),
        max_size=12,
    )
)
def test_vllm(flags: list[tuple[str, str]]) -> None:
    check(VLLM, VLLM.read("vllm serve model " + " ".join(f"{key} {value}" for key, value in flags), 8))


@pytest.mark.parametrize("framework", [ACCELERATE, DEEPSPEED, TRANSFORMERS, VLLM], ids=lambda framework: framework.name)
def test_every_field_is_said_of_every_launch(framework: Framework) -> None:
    odd = Launch(
        zero=2, shard=4, tensor=2, dtype="fp4", optimizer="muon", checkpointing="attention", tp_plan={"a": "b"}
    )
    assert all(isinstance(say(odd), tuple) for say in framework.says.values())
    assert not framework.can_write(odd)


@pytest.mark.parametrize("framework", [ACCELERATE, DEEPSPEED, TRANSFORMERS, VLLM], ids=lambda framework: framework.name)
def test_other_texts_are_not_recognised(framework: Framework) -> None:
    assert not framework.recognises("")
    assert not framework.recognises("torchrun train.py --tensor-model-parallel-size 8")
    assert not framework.recognises("[parallelism]\ntensor_parallel_degree = 8\n")


@pytest.mark.parametrize("digits", [30, 5000])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("accelerate", "distributed_type: FSDP\nnum_processes: {n}\n"),
        ("deepspeed", '{{"train_batch_size": {n}}}'),
        ("transformers", '{{"per_device_train_batch_size": {n}}}'),
        ("torchtitan", "[training]\nlocal_batch_size = {n}\n"),
        ("megatron-lm", "torchrun pretrain_gpt.py --tensor-model-parallel-size {n}"),
        ("vllm", "vllm serve model --tensor-parallel-size {n}"),
    ],
)
def test_numbers_without_end_are_faults(name: str, text: str, digits: int) -> None:
    with suppress(JobError):  # where the text cannot be read at all
        assert framework_of(name, "").read(text.format(n="9" * digits), 8).faults
