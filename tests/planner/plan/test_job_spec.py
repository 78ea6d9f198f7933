"""The fields of a job stand once: Python's keywords, the command line's options and HTTP's fields are all of them."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

import pytest
import torch
import typer
from pydantic import ValidationError
from torch import nn

from api.cli.main import app
from api.requests.schemas import PlanRequest
from planner import PlanningSession, build_plan
from planner.errors import JobError, MeshError
from planner.plan.job import Job, job_of
from planner.plan.job_spec import JobOptions, JobSpec, spec_fields, spec_of

FIELDS = {item.name: item for item in spec_fields()}


def test_every_field_has_a_help_text_that_is_a_sentence() -> None:
    assert all(item.option.help.endswith(".") for item in spec_fields())


def test_the_keywords_for_type_checkers_are_the_fields() -> None:
    assert JobOptions.__annotations__.keys() == FIELDS.keys()
    names = {"ClusterSpec": Any, "MeshSpec": Any, "DeviceMesh": Any}
    options = typing.get_type_hints(JobOptions, localns=names)
    wider = {"dtype", "reduce_dtype", "pins", "data_axes", "opaque_modules", "techniques"}
    assert {name for name, item in FIELDS.items() if options[name] != item.type} == wider


def test_build_plan_shows_the_fields_with_their_defaults_and_help() -> None:
    parameters = inspect.signature(build_plan).parameters
    for name, item in FIELDS.items():
        assert parameters[name].default == (None if item.required else item.default)
        assert f"{name}: {item.option.help}" in (build_plan.__doc__ or "")
    assert parameters.keys() - FIELDS.keys() == {"model", "example_inputs", "tp_plan", "progress"}


def test_plan_s_options_are_the_fields() -> None:
    command = typer.main.get_command(app).commands["plan"]  # type: ignore[attr-defined]
    options = {option.name: option for option in command.params}
    for name, item in FIELDS.items():
        option = options[name]
        assert item.flag in option.opts
        assert option.help == item.option.help
        if not item.required and item.default != ():
            assert option.default == item.default
    assert options.keys() - FIELDS.keys() == {
        *("model", "output", "as_json", "no_cache"),
        *("details", "tokens", "price", "framework"),
    }


def test_the_request_s_fields_are_the_fields_that_a_client_may_ask_for() -> None:
    schema = PlanRequest.model_json_schema()["properties"]
    # On the command line the time limit is no part of the request: the plan cache does not depend on it.
    allowed = {name for name, item in FIELDS.items() if item.option.in_requests or name == "time_limit_s"}
    assert schema.keys() == {"model", *allowed}
    assert FIELDS.keys() - allowed == {"jobs"}
    for name in allowed:
        assert schema[name]["description"] == FIELDS[name].option.help
        if not FIELDS[name].required:
            assert schema[name]["default"] == (list(default) if (default := FIELDS[name].default) == () else default)


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch", 0), ("batch", 2**31 + 1), ("batch", "8"), ("batch", True), ("axes", 4), ("memory_gb", 0),
     ("ac", "some"), ("dtype", "int8"), ("planner", "best"), ("pins", ["x"] * 101), ("data_axes", ["x" * 101])],
)  # fmt: skip
def test_a_request_keeps_to_the_fields_limits(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        PlanRequest(model="gpt2", cluster="1x8xtoy", **{field: value})


def test_a_request_and_keywords_make_the_same_spec() -> None:
    given: dict[str, Any] = {"cluster": "1x8xtoy", "batch": 8, "pins": ["a=R@dp"], "fused": True}
    request = PlanRequest(model="gpt2", **given)
    assert request.spec == dataclasses.replace(spec_of(given), pins=("a=R@dp",))


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="bacth"):
        spec_of({"cluster": "1x8xtoy", "bacth": 8})


def test_the_job_of_a_spec_has_all_that_both_have() -> None:
    spec = JobSpec(
        cluster="1x8xtoy", seq=64, dtype="fp16", optimizer="sgd", memory_gb=2.0, zigzag=True, pins=("a=R@dp",)
    )
    job = job_of(spec, batch=4, flash_attention=True)
    shared = {f.name for f in dataclasses.fields(Job)} & FIELDS.keys() - {"batch", "headroom"}
    assert all(getattr(job, name) == getattr(spec, name) for name in shared)
    assert (job.batch, job.memory_bytes, job.flash_attention) == (4, 2 * 10**9, True)


def test_headroom_counts_where_no_cap_is_given() -> None:
    job = job_of(JobSpec(cluster="1x8xtoy"), batch=4, flash_attention=None)
    assert (job.headroom, job.memory_bytes, job.cap_bytes(1_000_000)) == (0.08, None, 920_000)
    capped = job_of(JobSpec(cluster="1x8xtoy", memory_gb=0.001), batch=4, flash_attention=None)
    assert (capped.headroom, capped.memory_bytes, capped.cap_bytes(5_000_000)) == (0.0, 1_000_000, 1_000_000)
    with pytest.raises(JobError, match=r"headroom is 1\.5"):
        Job(headroom=1.5)


def test_inference_runs_its_batch_at_once() -> None:
    job = job_of(JobSpec(cluster="1x8xtoy", phase="decode"), batch=4, flash_attention=None)
    assert (job.micro_batches, job.ac, job.training) == (1, "none", False)


def test_async_tp_needs_plans_that_cannot_be_run() -> None:
    with pytest.raises(JobError, match="executable"):
        job_of(JobSpec(cluster="1x8xtoy", async_tp=True), batch=4, flash_attention=None)


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch", 0), ("seq", 2**31 + 1), ("axes", 4), ("memory_gb", float("nan")), ("time_limit_s", 0.0),
     ("dtype", "int8"), ("phase", "serving"), ("attention_kernel", "flash4")],
)  # fmt: skip
def test_a_spec_keeps_to_its_fields_limits(field: str, value: Any) -> None:
    with pytest.raises(JobError, match=f"^{field} is ") as error:
        JobSpec(cluster="1x8xtoy", **{field: value})
    assert error.value.field == field


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [("batch", "64", "a whole number"), ("micro_batches", 2.0, "a whole number"), ("axes", True, "a whole number"),
     ("memory_gb", "40", "a number"), ("headroom", "8%", "a number"), ("ac", True, "text"), ("optimizer", None, "text"),
     ("executable_only", "no", "True or False"), ("pins", "a=R@tp", r"a list of texts, such as \['a=R@tp'\]"),
     ("opaque_modules", [1], "a list of texts"), ("data_axes", None, "a list of texts")],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_with_what_to_give(field: str, value: Any, advice: str) -> None:
    with pytest.raises(JobError, match=f"^{field} is .*Give {advice}") as error:
        JobSpec(cluster="1x8xtoy", **{field: value})
    assert error.value.field == field


@pytest.mark.parametrize("mesh", [8, ("dp", 8), {"dp": 8}])
def test_a_mesh_of_another_type_is_refused(mesh: Any) -> None:
    with pytest.raises(MeshError, match=r"^mesh is .*Give text, such as"):
        build_plan(nn.Linear(8, 8), example_inputs=(torch.zeros(8, 8),), cluster="1x8xtoy", mesh=mesh)


def test_a_tensor_is_no_tuple_of_example_inputs() -> None:
    with pytest.raises(JobError, match=r"^example_inputs is a Tensor.*such as \(tensor,\)"):
        build_plan(nn.Linear(8, 8), example_inputs=torch.zeros(8, 8), cluster="1x8xtoy", batch=8)  # type: ignore[arg-type]


def test_a_session_takes_a_spec_or_its_fields() -> None:
    with pytest.raises(TypeError, match="spec and batch are given"):
        PlanningSession(nn.Linear(4, 4), spec=JobSpec(cluster="1x8xtoy"), batch=4)
