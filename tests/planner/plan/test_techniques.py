"""A job's list of techniques: how it is read, its faults, and the fields that stand for single techniques."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from api.requests.model_configs import FUSED_PROJECTIONS
from api.requests.plan_request import check_request
from api.requests.schemas import PlanRequest
from planner.errors import JobError
from planner.plan.document import parse_document
from planner.plan.job import Job, job_of
from planner.plan.job_spec import JobSpec, spec_of
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.techniques import FIELDS, TECHNIQUES, TechniqueGain, technique_names, with_technique_list

CLUSTER = "1x8xh100-sxm-80gb"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, ()),
        ("", ()),
        ("none", ()),
        (("none",), ()),
        ("zigzag", ("zigzag",)),
        (" zigzag , fused-ops,", ("fused-ops", "zigzag")),
        (["zigzag,fused-ops", "zigzag"], ("fused-ops", "zigzag")),
        ("Fused_Ops", ("fused-ops",)),
        ("even-order,packed", ("fused-projections", "zigzag")),
        ("flash3,auto", ("auto", "flash3")),
    ],
)
def test_a_list_is_read_in_one_order_without_repetitions(given: Any, names: tuple[str, ...]) -> None:
    assert technique_names(given) == names
    assert JobSpec(cluster=CLUSTER, techniques=given).techniques == names


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(JobError) as error:
        JobSpec(cluster="1x8xa100-sxm-80gb", techniques="zigzg,async-tp,magic,flash3")
    message = str(error.value)
    for said in ("'zigzg' (did you mean zigzag?)", "'magic'", "--no-executable-only", "a100-sxm-80gb does not run"):
        assert said in message
    assert all(name in message for name in TECHNIQUES)
    assert error.value.field == "techniques"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("none,zigzag", "none and zigzag"),
        (3, "techniques is 3"),
        ([1], r"techniques is \[1\]"),
        ("fused-op", "fused-ops?"),
    ],
)
def test_a_wrong_list_is_an_error(given: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        JobSpec(cluster=CLUSTER, techniques=given)


def test_fields_of_single_techniques_add_to_the_list() -> None:
    options = {
        "cluster": CLUSTER,
        "techniques": "zigzag",
        "fused": True,
        "reallgather": False,
        "attention_kernel": "flash3",
    }
    spec = spec_of(options)
    assert spec.techniques == ("fused-ops", "zigzag", "flash3")
    assert (spec.fused_ops, spec.zigzag, spec.reallgather, spec.attention_kernel) == (True, True, False, "flash3")
    assert PlanRequest(model="gpt2", **options).spec == spec
    for name, field in FIELDS.items():
        assert with_technique_list({field: True}) == {"techniques": (name,)}
        assert with_technique_list({field: False}) == {}
        with pytest.raises(JobError, match=f"{field} is 'yes'"):
            with_technique_list({field: "yes"})
    with pytest.raises(JobError, match="none and fused-ops"):
        JobSpec(cluster=CLUSTER, techniques="none", fused_ops=True)


def test_a_job_records_each_technique_in_a_field_of_its_own() -> None:
    spec = JobSpec(cluster=CLUSTER, techniques=TECHNIQUES, executable_only=False)
    job = job_of(spec, batch=8, flash_attention=True)
    assert job.fused_ops
    assert job.fused_projections
    assert job.zigzag
    assert job.reallgather
    assert job.async_tp
    assert job.attention_kernel == "flash3"
    assert spec.heterogeneous_blocks
    assert job_of(JobSpec(cluster=CLUSTER, techniques="none"), batch=8, flash_attention=True) == Job(
        batch=8, flash_attention=True, headroom=0.08
    )


def test_a_request_has_one_field_for_them() -> None:
    schema = PlanRequest.model_json_schema()["properties"]
    assert not schema.keys() & {*FIELDS.values(), "attention_kernel"}
    assert set(schema["techniques"]["items"]["enum"]) == {*TECHNIQUES, "auto"}
    job = {"model": "llama-3.1-8b", "cluster": CLUSTER, "batch": 8, "seq": 16}
    as_list = PlanRequest.model_validate({**job, "techniques": ["zigzag", "fused-ops"]})
    assert as_list == PlanRequest.model_validate({**job, "techniques": "fused-ops,zigzag"})
    assert as_list == PlanRequest.model_validate({**job, "fused_ops": True, "zigzag": True})
    assert PlanRequest.model_validate({**job, "model": f"llama-3.1-8b{FUSED_PROJECTIONS}"}).spec.fused_projections
    with pytest.raises(JobError, match="did you mean zigzag"):
        PlanRequest.model_validate({**job, "techniques": ["zagzig"]})
    with pytest.raises(ValidationError):
        PlanRequest.model_validate({**job, "technique": "zigzag"})


def test_a_request_for_a_device_in_a_mapping_is_checked_too() -> None:
    cluster = {"nodes": 1, "devices_per_node": 8, "device": "a100-sxm-80gb"}
    request = PlanRequest(model="llama-3.1-8b", cluster=cluster, batch=8, seq=16, techniques="flash3")
    with pytest.raises(JobError, match="a100-sxm-80gb does not run"):
        check_request(request, allow_local=False)


def test_a_plan_keeps_its_techniques_and_older_plans_have_none() -> None:
    document = {"format_version": 1, "mesh": {"names": ["dp"], "shape": [2], "device": "cpu"}}
    assert ShardingPlan.from_dict(document).techniques == ()
    gains = [{"name": "zigzag", "gain_s": 0.5}, {"name": "flash3", "gain_s": None}]
    plan = ShardingPlan.from_dict({**document, "techniques": gains})
    assert plan.techniques == (TechniqueGain(name="zigzag", gain_s=0.5), TechniqueGain(name="flash3"))
    assert plan.to_dict()["techniques"] == gains
    assert parse_document(plan.to_dict()).techniques == list(plan.techniques)
