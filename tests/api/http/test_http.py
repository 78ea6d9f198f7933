"""The service as a client meets it: a real server, real worker processes, small models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.serving import Server
from support.small_models import TINY_REQUEST

from api.remote.client import RemotePlanningError, RemoteShardingPlanner
from api.requests.model_registry import load_model
from planner.errors import InfeasibleError
from planner.plan.sharding_plan import ShardingPlan

PROBLEM = "application/problem+json"
QUICKLY_REFUSED = {"planner": "data-parallel", "batch": 6}
"""Changes to a request that a worker refuses once it has looked at the model: 6 samples over 4 devices."""


def without_timings(plan: ShardingPlan) -> dict[str, Any]:
    """Return all of a plan but how long it took to find."""
    data = plan.to_dict()
    del data["timings"]
    del data["solver"]["time_s"]
    return data


@pytest.fixture(scope="module")
def python_plan() -> ShardingPlan:
    """The plan that Python makes of ``tiny_request``."""
    from planner import build_plan

    options = {name: value for name, value in TINY_REQUEST.items() if name != "model"}
    return build_plan(load_model(TINY_REQUEST["model"]).module, **options)


def submit(server: Server, request: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/plans", json=request, timeout=30)


def test_health_and_description(server: Server) -> None:
    health = httpx2.get(f"{server.url}/healthz").json()
    assert health["status"] == "ok"
    description = httpx2.get(f"{server.url}/openapi.json").json()
    assert {"/healthz", "/readyz", "/metrics", "/v1/plans", "/v1/plans/{job_id}"} < set(description["paths"])
    assert httpx2.get(f"{server.url}/docs").status_code == 200


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": {"hf_config": {}, "code": "x"}}, "code"),
        ({"model": {"hf_config": {"hidden_size": 8}}}, "no model_type"),
        ({"model": "os:system"}, "there is no model 'os:system'"),
        ({"model": "/etc/passwd"}, "there is no model '/etc/passwd'"),
        ({"model": "pyproject.toml"}, "there is no model"),
        ({"cluster": "4x8xh100"}, "did you mean"),
        ({"cluster": "/etc/cluster.yaml"}, "reads no files"),
        ({"cluster": "/etc/cluster.json"}, "reads no files"),
        ({"cluster": {"devices_per_node": 4, "device": {"like": "toi"}}}, "unknown device 'toi'"),
        ({"cluster": {"devices_per_node": 4, "device": {"like": "toy", "memory": 1}}}, "unknown key 'memory'"),
        ({"cluster": {"nodes": 1, "devices_per_node": 4, "device": "toy", "sweeps": ["/etc/passwd"]}}, "names a file"),
        ({"cluster": {"device": "toy", "devices_per_node": 4, "sweeps": [{"file": "../x"}]}}, "names a file"),
        ({"cluster": "99999x99999xtoy"}, "at most"),
        ({"cluster": {"nodes": 1, "devices_per_node": 4, "device": "toy", "colour": "red"}}, "colour"),
        ({"mesh": "dp=3"}, "3 devices"),
        ({"mesh": "dp"}, "cannot read mesh"),
        ({"batch": 0}, "batch"),
        ({"batch": "8"}, "batch"),
        ({"batch": 8, "micro_batches": 3}, "does not divide"),
        ({"seq": -1}, "seq"),
        ({"ac": "some"}, "ac"),
        ({"memory_gb": -1}, "memory_gb"),
        ({"optimizer": "magic"}, "no optimizer 'magic'"),
        ({"planner": "random"}, "planner"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_request_that_cannot_be_is_422_with_problem_details(
    server: Server, tiny_request: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    answer = submit(server, {**tiny_request, **change})
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == PROBLEM
    problem = answer.json()
    assert problem["status"] == 422
    assert problem["title"]
    assert said in problem["detail"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b"\x80\x04\x95pickle", b"[" * 100_000, b'{"memory_gb": NaN}', b"\xff\xfe"],
    ids=["empty", "cut off", "list", "text", "pickle", "deep", "nan", "not utf-8"],
)
def test_body_that_is_no_request_is_a_client_error_with_problem_details(server: Server, body: bytes) -> None:
    answer = httpx2.post(f"{server.url}/v1/plans", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in {400, 422}
    assert answer.headers["content-type"] == PROBLEM


@pytest.mark.parametrize("announced", [True, False])
def test_body_that_is_too_large_is_413(server: Server, announced: bool) -> None:
    body = json.dumps({"model": "x" * 2_000_000}).encode()

    def pieces() -> Iterator[bytes]:
        yield body

    answer = httpx2.post(
        f"{server.url}/v1/plans",
        content=body if announced else pieces(),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 413
    assert answer.headers["content-type"] == PROBLEM


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/plans/none", 404), ("GET", "/x", 404), ("PUT", "/v1/plans", 405)]
)
def test_what_is_not_there_is_told_in_problem_details(server: Server, method: str, path: str, status: int) -> None:
    answer = httpx2.request(method, server.url + path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == PROBLEM
    assert answer.json()["status"] == status


def test_plan_is_the_one_that_python_makes_and_comes_at_once_the_second_time(
    server: Server, tiny_request: dict[str, Any], python_plan: ShardingPlan
) -> None:
    first = submit(server, tiny_request)
    assert first.status_code == 202
    assert first.json()["status"] in {"queued", "running"}
    assert first.headers["location"] == f"/v1/plans/{first.json()['id']}"
    ended = server.until_ended(first.json()["id"])
    assert ended["status"] == "succeeded", ended["error"]
    assert ended["error"] is None

    second = submit(server, tiny_request)
    assert second.status_code == 200
    assert second.json() == ended

    assert without_timings(ShardingPlan.from_dict(ended["plan"])) == without_timings(python_plan)


def test_remote_planner_gives_the_plan_of_a_module(
    server: Server, tiny_request: dict[str, Any], python_plan: ShardingPlan
) -> None:
    module = load_model(tiny_request["model"]).module
    options = {name: value for name, value in tiny_request.items() if name != "model"}
    plan = RemoteShardingPlanner(server.url, **options).build_plan(module)
    assert without_timings(plan) == without_timings(python_plan)


def test_progress_comes_as_events_and_goes_on_from_where_a_client_was(
    server: Server, tiny_request: dict[str, Any]
) -> None:
    job = submit(server, {**tiny_request, "mesh": None, "seq": 16, "tolerance": 0.0}).json()["id"]
    seen = events(server, job)
    stages = [data["stage"] for _, data in seen]
    assert stages[:2] == ["queued", "running"]
    assert stages[-2:] == ["planned", "succeeded"]
    assert {"tracing", "bounding", "solving", "best"} < set(stages)
    bounds = [data for _, data in seen if data["stage"] == "bounding"]
    assert [data["mesh_number"] for data in bounds] == list(range(1, len(bounds) + 1))
    assert {data["meshes"] for data in bounds} == {len(bounds)}
    planned = seen[-2][1]
    assert planned["gap"] < 0.01
    best = [data["step_time_s"] for _, data in seen if data["stage"] == "best"]
    assert best == sorted(best, reverse=True)
    assert planned["step_time_s"] == pytest.approx(best[-1], rel=1e-4)
    assert events(server, job, after=seen[3][0]) == seen[4:]


def events(server: Server, job: str, after: int | None = None) -> list[tuple[int, dict[str, Any]]]:
    """Return a job's events to its end, each with its id."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    answer = httpx2.get(f"{server.url}/v1/plans/{job}/events", headers=headers, timeout=120)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "id" in fields:
            found.append((int(fields["id"]), json.loads(fields["data"])))
    return found


def test_plans_are_compared_by_their_jobs_and_as_they_are(
    server: Server, tiny_request: dict[str, Any], python_plan: ShardingPlan
) -> None:
    job = submit(server, tiny_request).json()["id"]
    server.until_ended(job)
    other = python_plan.to_dict() | {"micro_batches": 2}
    answer = httpx2.post(f"{server.url}/v1/plans/diff", json={"left": job, "right": other})
    assert answer.json()["settings"] == [{"field": "micro_batches", "key": "", "left": 1, "right": 2}]
    assert httpx2.post(f"{server.url}/v1/plans/diff", json={"left": job, "right": job}).json()["equal"]


def test_metrics_count_what_was_done(server: Server, tiny_request: dict[str, Any]) -> None:
    server.until_ended(submit(server, tiny_request).json()["id"])
    text = httpx2.get(f"{server.url}/metrics").text
    assert 'shardplan_jobs{status="succeeded"}' in text
    assert 'shardplan_solver_status_total{status="optimal"}' in text
    assert 'shardplan_solve_seconds_count{outcome="succeeded"}' in text
    assert 'shardplan_request_seconds_count{method="POST",route="/v1/plans",status="200"}' in text


def test_impossible_request_fails_with_the_least_that_would_fit(server: Server, tiny_request: dict[str, Any]) -> None:
    answer = submit(server, {**tiny_request, "memory_gb": 1e-6})
    ended = server.until_ended(answer.json()["id"])
    assert ended["status"] == "failed"
    assert ended["plan"] is None
    assert ended["error"]["title"] == "No plan fits the memory"
    assert ended["error"]["budget_bytes"] == 1000
    assert ended["error"]["least_bytes"] > 1000
    assert submit(server, {**tiny_request, "memory_gb": 1e-6}).status_code == 200


def test_remote_planner_raises_what_the_planner_would(server: Server, tiny_request: dict[str, Any]) -> None:
    module = load_model(tiny_request["model"]).module
    options = {name: value for name, value in tiny_request.items() if name != "model"}
    with pytest.raises(InfeasibleError) as caught:
        RemoteShardingPlanner(server.url, **{**options, "memory_gb": 1e-6}).build_plan(module)
    assert caught.value.least_bytes is not None


def test_config_that_builds_nothing_fails_with_the_reason(server: Server, tiny_request: dict[str, Any]) -> None:
    model = {"hf_config": {**tiny_request["model"]["hf_config"], "num_attention_heads": 0}}
    ended = server.until_ended(submit(server, {**tiny_request, "model": model}).json()["id"])
    assert ended["status"] == "failed"
    assert "ZeroDivisionError" in ended["error"]["detail"]
    assert "Traceback" not in json.dumps(ended)


def test_code_that_a_config_names_is_never_run(server: Server, tiny_request: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    model = {
        "hf_config": {
            **tiny_request["model"]["hf_config"],
            "auto_map": {"AutoModelForCausalLM": f"{tmp_path}--evil.Model"},
            "_attn_implementation": "evil/kernel",
            "_name_or_path": str(tmp_path),
            "architectures": ["evil.Model"],
        }
    }
    ended = server.until_ended(submit(server, {**tiny_request, "model": model}).json()["id"])
    assert ended["status"] == "succeeded", ended["error"]
    assert any("never run" in note for note in ended["plan"]["notes"])
    assert not (tmp_path / "ran").exists()


def test_waiting_job_can_be_cancelled_and_asked_for_again(
    run_server: Callable[..., Server], tmp_path: Path, tiny_request: dict[str, Any]
) -> None:
    server = run_server(tmp_path / "data")
    # Its one worker takes seconds to start, so both wait.
    slow = submit(server, {**tiny_request, **QUICKLY_REFUSED}).json()["id"]
    job = submit(server, {**tiny_request, **QUICKLY_REFUSED, "seq": 64}).json()["id"]
    cancelled = httpx2.delete(f"{server.url}/v1/plans/{job}").json()
    assert cancelled["status"] == "cancelled"
    assert httpx2.delete(f"{server.url}/v1/plans/{job}").status_code == 409
    again = submit(server, {**tiny_request, **QUICKLY_REFUSED, "seq": 64})
    assert (again.status_code, again.json()["id"]) == (202, job)
    for name in (slow, job):
        ended = server.until_ended(name)
        assert (ended["status"], ended["error"]["type"]) == ("failed", "urn:shardplan:mesh-error")


def test_jobs_survive_a_server_that_is_killed(
    run_server: Callable[..., Server], tmp_path: Path, tiny_request: dict[str, Any]
) -> None:
    first = run_server(tmp_path / "data")
    requests = (tiny_request, {**tiny_request, **QUICKLY_REFUSED})
    jobs = [submit(first, request).json()["id"] for request in requests]
    helpers = first.children()
    first.kill()
    assert helpers
    assert all(helper.until_gone() for helper in helpers)
    second = run_server(tmp_path / "data")
    assert [second.until_ended(job)["status"] for job in jobs] == ["succeeded", "failed"]
    assert submit(second, tiny_request).status_code == 200
    second.stop()
    assert '"event": "stopped"' in second.log.read_text()


def test_second_server_on_the_same_data_is_refused(run_server: Callable[..., Server], tmp_path: Path) -> None:
    run_server(tmp_path / "data")
    with pytest.raises(AssertionError, match="another server works on"):
        run_server(tmp_path / "data")


def test_server_turns_away_more_than_it_may_hold_and_stops_though_it_is_followed(
    run_server: Callable[..., Server], tmp_path: Path, tiny_request: dict[str, Any]
) -> None:
    server = run_server(tmp_path / "data", SHARDPLAN_MAX_QUEUED="1")
    answers = [submit(server, {**tiny_request, "seq": seq}) for seq in (8, 16, 24, 32)]
    assert answers[-1].status_code == 429
    assert int(answers[-1].headers["retry-after"]) > 0
    with httpx2.stream("GET", f"{server.url}/v1/plans/{answers[0].json()['id']}/events", timeout=60) as following:
        assert next(following.iter_lines()).startswith("id: ")
        assert server.stop() == 0
    assert answers[-1].headers["content-type"] == PROBLEM


def test_remote_planner_names_a_server_that_does_not_answer() -> None:
    planner = RemoteShardingPlanner("http://127.0.0.1:9", cluster="1x4xtoy", model="gpt2", retries=0)
    with pytest.raises(RemotePlanningError, match=r"cannot reach http://127.0.0.1:9"):
        planner.build_plan(load_model("gpt2").module)


def test_remote_planner_passes_on_what_the_server_says(server: Server) -> None:
    planner = RemoteShardingPlanner(server.url, cluster="1x4xtoi", model="gpt2", batch=8, seq=8)
    with pytest.raises(RemotePlanningError, match="unknown device 'toi'") as caught:
        planner.build_plan(load_model("gpt2").module)
    assert caught.value.problem["status"] == 422
