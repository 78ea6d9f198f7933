"""Faults of a request: all at once, before a job is queued, in words of who reads them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from api.requests.client_texts import for_client
from api.requests.comparisons import ComparisonRequest, check_comparison
from api.requests.errors import error_data, problem_of
from api.requests.faults import ManyFaultsError
from api.requests.plan_request import OpenedRequest, check_request, fingerprint
from api.requests.schemas import PlanRequest
from cost_model.hardware.cluster import ClusterSpec
from planner.errors import JobError
from planner.plan.job_spec import spec_fields

JOB = {"cluster": "1x8xh100-sxm-80gb", "batch": 8, "seq": 128}


def refused(request: dict[str, Any]) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - which error it is, is what the tests are about
        check_request(PlanRequest(**request), allow_local=False)
    return raised.value


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("gpt2", {}, "batch and seq are missing"),
        ("gpt2", {"seq": 128}, "batch is missing"),
        ("gpt2", {"batch": 8}, "seq is missing"),
        ("vit-large", {}, "batch is missing"),
        ("t5-large", {}, "batch and seq are missing"),
        ({"hf_config": {"model_type": "llama"}}, {}, "batch and seq are missing"),
    ],
)
def test_what_planning_cannot_start_without_is_asked_for_at_once(model: Any, given: dict[str, int], said: str) -> None:
    error = refused({"model": model, "cluster": "1x8xh100-sxm-80gb", **given})
    assert isinstance(error, JobError)
    assert error.detail == f"{said}."
    assert "--" not in problem_of(error)["what_to_do"]
    assert "--" in error_data(error)["what_to_do"], "the command line names its options"


def test_an_image_model_needs_no_sequences() -> None:
    check_request(PlanRequest(model="vit-large", cluster="1x8xh100-sxm-80gb", batch=8), allow_local=False)


def test_comparisons_ask_for_what_they_need_too() -> None:
    request = {"model": "gpt2", "cluster": "1x8xh100-sxm-80gb"}
    with pytest.raises(JobError, match="batch and seq are missing"):
        check_comparison(ComparisonRequest.model_validate({"kind": "sweep", "request": request}).root)
    with pytest.raises(JobError, match="seq is missing"):
        check_comparison(ComparisonRequest.model_validate({"kind": "batches", "request": request}).root)


def test_all_faults_are_reported_at_once() -> None:
    error = refused({"model": "gpt-17", "cluster": "1x8xh100", "optimizer": "magic", "mesh": "dp"})
    assert isinstance(error, ManyFaultsError)
    problem = problem_of(error)
    assert [fault["where"] for fault in problem["errors"]] == ["cluster", "model", "optimizer", "mesh"]
    assert all(fault["what"].rstrip(".") in problem["detail"] for fault in problem["errors"])
    assert problem_of(copy.copy(error)) == problem


def test_a_mesh_is_not_blamed_for_a_cluster_that_cannot_be_read() -> None:
    error = refused({"model": "gpt2", **JOB, "cluster": "1x8xh100", "mesh": "dp=3"})
    assert "unknown device" in str(error)
    assert "dp=3" not in str(error)


def test_no_option_of_a_job_is_left_in_a_text_for_clients() -> None:
    for item in spec_fields():
        assert for_client(f"Give {item.flag} x, or leave {item.flag} out.").startswith(f"Give {item.name}")
        assert "--" not in for_client(f"Give {item.flag}, --no-{item.flag.removeprefix('--')} x." * (item.type is bool))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Add --no-executable-only (executable_only=False), or leave it out.", "Add executable_only: false, or"),
        ("Plan with --executable-only (executable_only=True), which", "Plan with executable_only: true, which"),
        ("more micro-batches (--micro-batches)", "more micro-batches (micro_batches)"),
        ("--micro-batch-size is 3", "--micro-batch-size is 3"),
        ("its micro-batch is --micro-batch.", "its micro-batch is micro_batch."),
        ("Name those that `shardplan plan` chose.", "Name those that POST /v1/plans chose."),
        ("Price it: shardplan estimate MODEL PLAN.", "Price it: planner.estimate_plan, in Python."),
        ("a graph that shardplan made", "a graph that shardplan made"),
    ],
)
def test_texts_for_clients(text: str, words: str) -> None:
    assert words in for_client(text)


@pytest.mark.parametrize(
    ("own_s", "server_s", "used_s"),
    [(None, 600.0, 600.0), (5.0, 600.0, 5.0), (900.0, 600.0, 600.0), (None, None, None)],
)
def test_a_request_has_a_time_limit_below_the_server_s(
    own_s: float | None, server_s: float | None, used_s: float | None
) -> None:
    request = PlanRequest(model="gpt2", **JOB, time_limit_s=own_s)
    opened = OpenedRequest(model=Any, cluster=ClusterSpec.parse(JOB["cluster"]), spec=request.spec)  # type: ignore[arg-type]
    assert opened.searched(server_s, 1).time_limit_s == used_s


@pytest.mark.parametrize("limit_s", [0, -1, float("nan"), float("inf")])
def test_a_time_limit_is_a_positive_number(limit_s: Any) -> None:
    with pytest.raises(ValueError, match="time_limit_s"):
        PlanRequest(model="gpt2", **JOB, time_limit_s=limit_s)


def test_a_request_with_another_time_limit_is_another_request() -> None:
    names = {
        fingerprint(PlanRequest(model="gpt2", **JOB, time_limit_s=limit), allow_local=False) for limit in (None, 5, 9)
    }
    assert len(names) == 3
