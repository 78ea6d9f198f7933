"""Checks of configurations and exports of plans over HTTP: a real server gives what Python gives."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2
import pytest
from support.serving import Server
from support.small_models import TINY_LLAMA, TINY_REQUEST

from api.frameworks.check import check
from api.frameworks.export import export_plan
from api.remote.client import RemoteShardingPlanner
from planner.errors import JobError
from planner.plan.sharding_plan import ShardingPlan

MODEL = {"hf_config": TINY_LLAMA}
CONFIGURATION = json.dumps(
    {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
)
BODY = {"model": MODEL, "cluster": "1x4xtoy", "configuration": CONFIGURATION, "seq": 16}


def ended(server: Server, path: str, job: dict[str, Any]) -> dict[str, Any]:
    while job["status"] in ("queued", "running"):
        time.sleep(0.2)
        job = httpx2.get(f"{server.url}{path}/{job['id']}").raise_for_status().json()
    return job


def posted(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = httpx2.post(f"{server.url}{path}", json=body).raise_for_status().json()
    return ended(server, path, job)


def test_a_check_is_what_python_finds(server: Server) -> None:
    job = posted(server, "/v1/checks", BODY)
    assert job["status"] == "succeeded", job
    expected = check(MODEL, CONFIGURATION, cluster="1x4xtoy", seq=16).to_dict()
    assert job["result"] == json.loads(json.dumps(expected))
    assert job["result"]["plan"]["mesh"] == "fsdp=4"
    again = httpx2.post(f"{server.url}/v1/checks", json=BODY)
    assert (again.status_code, again.json()["id"]) == (200, job["id"])


def test_faults_are_a_result_and_no_failure(server: Server) -> None:
    job = posted(server, "/v1/checks", {**BODY, "cluster": "1x3xtoy", "plans": False})
    assert job["status"] == "succeeded"
    assert job["result"]["legal"] is True  # nothing has to divide: 3 shards of a batch of 6
    wrong = CONFIGURATION.replace('"stage"', '"stge"').replace("bf16", "bf61")
    job = posted(server, "/v1/checks", {**BODY, "configuration": wrong, "framework": "deepspeed", "plans": False})
    assert job["result"]["legal"] is False
    assert len(job["result"]["faults"]) == 2
    assert "zero_optimization.stage" in " ".join(job["result"]["faults"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "gpt-17"}, "gpt-17"),
        ({"model": "package.module:factory"}, "factory"),
        ({"cluster": "file.yaml"}, "reads no files"),
        ({"framework": "jax"}, "no framework 'jax'"),
        ({"configuration": "hello"}, "no framework's configuration looks like this"),
        ({"seq": 0}, "seq"),
    ],
)
def test_a_bad_request_is_refused_at_once(server: Server, change: dict[str, Any], words: str) -> None:
    answer = httpx2.post(f"{server.url}/v1/checks", json={**BODY, **change})
    assert answer.status_code == 422
    assert words in answer.text
    assert "--from" not in answer.text


def test_a_plan_is_exported(server: Server) -> None:
    job = posted(server, "/v1/plans", TINY_REQUEST)
    plan = ShardingPlan.from_dict(job["plan"])
    for name in ("torch", "torchtitan", "accelerate"):
        answer = httpx2.get(f"{server.url}/v1/plans/{job['id']}/export", params={"to": name}).raise_for_status()
        assert answer.json() == export_plan(plan, name, allow_local=False).to_dict()
    assert httpx2.get(f"{server.url}/v1/plans/{job['id']}/export", params={"to": "jax"}).status_code == 422
    assert httpx2.get(f"{server.url}/v1/plans/{job['id']}/export").status_code == 422
    assert httpx2.get(f"{server.url}/v1/plans/{'0' * 32}/export", params={"to": "torch"}).status_code == 404


def test_the_client_checks_a_configuration(server: Server) -> None:
    remote = RemoteShardingPlanner(server.url, model=MODEL, cluster="1x4xtoy", seq=16)
    found = remote.check(CONFIGURATION, plans=False)
    assert found == json.loads(
        json.dumps(check(MODEL, CONFIGURATION, cluster="1x4xtoy", seq=16, plans=False).to_dict())
    )
    with pytest.raises(JobError, match="a configuration is checked for a model"):
        RemoteShardingPlanner(server.url, cluster="1x4xtoy").check(CONFIGURATION)
