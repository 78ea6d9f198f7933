"""Comparisons and explanations over HTTP: a real server gives what Python and the command line give."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from support.serving import Server
from support.small_models import TINY_LLAMA, TINY_REQUEST
from typer.testing import CliRunner

from api.cli.main import app as command_line
from api.jobs.tokens import TokenStore
from api.render.tradeoff_rows import TradeoffRow, alternative_rows, batch_rows, pareto_rows, sweep_rows
from api.requests.plan_request import opened_request
from api.requests.schemas import PlanRequest
from planner.plan.sharding_plan import ShardingPlan

PROBLEM = "application/problem+json"
ANY_MESH = {name: value for name, value in TINY_REQUEST.items() if name != "mesh"}
DECODE = {"model": {"hf_config": TINY_LLAMA}, "cluster": "1x2xtoy", "mesh": "dp=2", "seq": 16, "dtype": "fp32"}
BODIES: dict[str, dict[str, Any]] = {
    "alternatives": {"kind": "alternatives", "request": ANY_MESH, "count": 1},
    "pareto": {"kind": "pareto", "request": TINY_REQUEST},
    "sweep": {"kind": "sweep", "request": ANY_MESH, "objective": "step-time", "devices": [1, 2], "price": 3.6},
    "batches": {"kind": "batches", "request": DECODE, "most": 2},
}
PLAN_ID = "0" * 32


def python_rows(kind: str) -> list[TradeoffRow]:
    """The rows that Python finds for the body of a kind."""
    changes = {"batch": 1, "phase": "decode"} if kind == "batches" else {}
    request = opened_request(PlanRequest(**{**BODIES[kind]["request"], **changes}), allow_local=False)
    if kind == "alternatives":
        return alternative_rows(request, 1, None)
    if kind == "pareto":
        return pareto_rows(request, "dp=2,tp=2", None)
    if kind == "sweep":
        return sweep_rows(request, "step-time", within_s=None, price=3.6, time_limit_s=None, counts=[1, 2])
    return batch_rows(request, "dp=2", most=2, within_s=None, time_limit_s=None)


def without_timings(plan: dict[str, Any]) -> dict[str, Any]:
    """Return all of a plan but how long it took to find."""
    solver = {name: value for name, value in plan["solver"].items() if name != "time_s"}
    return {**{name: value for name, value in plan.items() if name != "timings"}, "solver": solver}


def post(server: Server, path: str, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", json=body, timeout=60)


def until_ended(server: Server, path: str, job_id: str) -> dict[str, Any]:
    pause = threading.Event()
    for _ in range(3000):
        job: dict[str, Any] = httpx2.get(f"{server.url}{path}/{job_id}").raise_for_status().json()
        if job["status"] not in {"queued", "running"}:
            return job
        pause.wait(0.1)
    raise AssertionError(f"job {job_id} is still {job['status']}")


def events(server: Server, path: str, job_id: str) -> list[dict[str, Any]]:
    text = httpx2.get(f"{server.url}{path}/{job_id}/events", timeout=120).text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("kind", BODIES)
def test_a_comparison_has_the_rows_of_python_with_their_plans(server: Server, kind: str) -> None:
    first = post(server, "/v1/comparisons", BODIES[kind])
    assert first.status_code == 202, first.text
    job = first.json()
    assert (job["kind"], job["result"]) == (kind, None)
    assert first.headers["location"] == f"/v1/comparisons/{job['id']}"
    seen = events(server, "/v1/comparisons", job["id"])
    ended = until_ended(server, "/v1/comparisons", job["id"])
    assert ended["status"] == "succeeded", ended["error"]

    rows = [{**row, "plan": None} for row in ended["result"]]
    expected = python_rows(kind)
    assert rows == [{**row.to_dict(), "plan": None} for row in expected]
    assert len(rows) == 2
    for row, found in zip(expected, ended["result"], strict=True):
        assert row.plan is not None
        assert without_timings(ShardingPlan.from_dict(found["plan"]).to_dict()) == without_timings(row.plan.to_dict())

    stages = [event["stage"] for event in seen]
    assert (stages[:2], stages[-1]) == (["queued", "running"], "succeeded")
    assert "solving" in stages
    subjects = {event["subject"] for event in seen if "subject" in event}
    assert subjects == {"sweep": {"1x1xtoy", "1x2xtoy"}, "batches": {"batch 1", "batch 2"}}.get(kind, set())

    again = post(server, "/v1/comparisons", BODIES[kind])
    assert (again.status_code, again.json()) == (200, ended)


def test_plans_comparisons_and_explanations_are_not_listed_or_read_as_each_other(server: Server) -> None:
    comparison = post(server, "/v1/comparisons", BODIES["pareto"]).json()["id"]
    plan = post(server, "/v1/plans", TINY_REQUEST).json()["id"]
    for path, own, other in (("plans", plan, comparison), ("comparisons", comparison, plan)):
        listed = httpx2.get(f"{server.url}/v1/{path}").json()["jobs"]
        assert own in {job["id"] for job in listed}
        assert other not in {job["id"] for job in listed}
        assert httpx2.get(f"{server.url}/v1/{path}/{own}").status_code == 200
        for rest in ("", "/events", "/view", "/trace", "/report", "/request"):
            assert httpx2.get(f"{server.url}/v1/{path}/{other}{rest}").status_code == 404
        assert httpx2.get(f"{server.url}/v1/explanations/{own}").status_code == 404
        assert httpx2.delete(f"{server.url}/v1/{path}/{other}").status_code == 404
    assert post(server, "/v1/plans/diff", {"left": comparison, "right": comparison}).status_code == 404
    assert post(server, "/v1/explanations", {"plan": comparison, "parameter": "x"}).status_code == 404


@pytest.fixture(scope="module")
def plan(server: Server) -> dict[str, Any]:
    """The job that makes the plan of the explanations."""
    ended = server.until_ended(post(server, "/v1/plans", TINY_REQUEST).json()["id"])
    assert ended["status"] == "succeeded", ended["error"]
    return ended


def test_an_explanation_is_that_of_the_command_line(server: Server, plan: dict[str, Any], tmp_path: Path) -> None:
    answer = post(server, "/v1/explanations", {"plan": plan["id"], "parameter": "model.norm.weight"})
    assert answer.status_code == 202, answer.text
    job = answer.json()["id"]
    seen = events(server, "/v1/explanations", job)
    ended = until_ended(server, "/v1/explanations", job)
    assert (ended["kind"], ended["status"]) == ("explanation", "succeeded"), ended["error"]

    (tmp_path / "plan.json").write_text(json.dumps(plan["plan"]))
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    command = ["explain", str(tmp_path / "config.json"), str(tmp_path / "plan.json"), "model.norm.weight", "--json"]
    printed = CliRunner().invoke(command_line, command)
    assert printed.exit_code == 0, printed.output
    assert ended["result"] == json.loads(printed.stdout)
    priced = [event for event in seen if event["stage"] == "alternative"]
    assert len(priced) == len(ended["result"]["alternatives"]) > 1

    document = {"plan": plan["plan"], "model": TINY_REQUEST["model"], "parameter": "model.norm.weight"}
    again = post(server, "/v1/explanations", document)
    assert (again.status_code, again.json()) == (200, ended), "the job's plan and model are what it stands for"


def test_an_explanation_of_a_parameter_that_is_not_there_fails_and_says_so(
    server: Server, plan: dict[str, Any]
) -> None:
    job = post(server, "/v1/explanations", {"plan": plan["id"], "parameter": "lm_head.weigh"}).json()["id"]
    ended = until_ended(server, "/v1/explanations", job)
    assert (ended["status"], ended["result"]) == ("failed", None)
    assert "no parameter 'lm_head.weigh'" in ended["error"]["detail"]


def test_a_comparison_that_runs_can_be_cancelled(server: Server) -> None:
    large = {"model": "llama-3.1-70b", "cluster": "8x8xh100-sxm-80gb", "batch": 64, "seq": 4096}
    job = post(server, "/v1/comparisons", {"kind": "sweep", "request": large}).json()["id"]
    address = f"{server.url}/v1/comparisons/{job}"
    with httpx2.stream("GET", f"{address}/events", timeout=120) as following:
        assert any('"subject"' in line for line in following.iter_lines())
        assert httpx2.delete(address).json()["status"] == "cancelled"
    assert until_ended(server, "/v1/comparisons", job)["status"] == "cancelled"
    too_small = {"kind": "pareto", "request": {**TINY_REQUEST, "memory_gb": 1e-6}}
    after = until_ended(server, "/v1/comparisons", post(server, "/v1/comparisons", too_small).json()["id"])
    assert (after["status"], after["error"]["title"]) == ("failed", "No plan fits the memory"), "the next job runs"


@pytest.fixture
def client(start: Callable[..., TestClient]) -> TestClient:
    return start()


def changed(kind: str, own: dict[str, Any] | None = None, **request: Any) -> dict[str, Any]:
    return {**BODIES[kind], **(own or {}), "request": {**BODIES[kind]["request"], **request}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"kind": "best", "request": ANY_MESH}, "'best' found using 'kind'"),
        ({"request": ANY_MESH}, "kind"),
        ({"kind": "pareto"}, "request"),
        (changed("pareto", {"count": 3}), "pareto.count"),
        (changed("alternatives", {"price": 3.0}), "alternatives.price"),
        (changed("alternatives", {"count": 0}), "count"),
        (changed("alternatives", mesh="dp=4"), "mesh is 'dp=4': alternatives does not take it"),
        (changed("sweep", pins=["lm_head.weight=R@dp"]), "pins is"),
        (changed("sweep", {"devices": [1, 5]}), "5 devices of 1x4xtoy"),
        (changed("sweep", {"devices": []}), "devices"),
        (changed("sweep", {"price": -1}), "price"),
        (changed("sweep", {"within_s": 0}), "within_s"),
        (changed("sweep", {"objective": "speed"}), "objective"),
        (changed("pareto", planner="fsdp"), "planner is 'fsdp': pareto does not take it"),
        (changed("pareto", executable_only=False), "executable_only"),
        (changed("pareto", techniques="auto"), "techniques is auto: for one plan"),
        (changed("pareto", techniques=["heterogeneous-blocks"], executable_only=False), "executable_only"),
        (changed("pareto", cluster="/etc/cluster.yaml"), "reads no files"),
        (changed("pareto", model="/etc/passwd"), "there is no model"),
        (changed("pareto", batch="8"), "batch"),
        (changed("batches", batch=8), "batch is 8: batches does not take it"),
        (changed("batches", phase="training"), "batches are compared for inference"),
        (changed("batches", ac="full"), "ac is 'full'"),
        (changed("batches", {"most": 0}), "most"),
    ],
)
def test_a_comparison_that_cannot_be_is_422_and_says_why(client: TestClient, body: dict[str, Any], said: str) -> None:
    answer = client.post("/v1/comparisons", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == PROBLEM
    assert said in answer.json()["detail"]
    assert client.get("/v1/comparisons").json()["jobs"] == []


def test_what_is_the_default_may_be_said(client: TestClient) -> None:
    defaults = {"mesh": None, "planner": "ilp", "pins": [], "techniques": []}
    first = client.post("/v1/comparisons", json=BODIES["sweep"])
    again = client.post("/v1/comparisons", json=changed("sweep", **defaults))
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json()["id"] == first.json()["id"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"plan": {}}, "plan"),
        ({"model": None}, "model is missing"),
        ({"model": "gpt3"}, "gpt3"),
        ({"model": "/etc/passwd"}, "there is no model"),
        ({"parameter": ""}, "parameter"),
        ({"cluster": "1x4xtoy"}, "cluster"),
        ({"kind": "pareto"}, "kind"),
    ],
)
def test_an_explanation_that_cannot_be_is_422_and_says_why(
    client: TestClient, hand_written_plan: ShardingPlan, change: dict[str, Any], said: str
) -> None:
    body = {"plan": hand_written_plan.to_dict(), "model": "gpt2", "parameter": "lm_head.weight"}
    assert client.post("/v1/explanations", json=body).status_code == 202
    answer = client.post("/v1/explanations", json={**body, **change})
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
    assert said in answer.json()["detail"]


def test_a_plan_that_names_a_file_of_the_server_is_refused(client: TestClient, hand_written_plan: ShardingPlan) -> None:
    plan = copy.deepcopy(hand_written_plan.to_dict())
    plan["cluster"]["sweeps"] = ["/etc/passwd"]
    answer = client.post("/v1/explanations", json={"plan": plan, "model": "gpt2", "parameter": "lm_head.weight"})
    assert answer.status_code == 422
    assert "names a file" in answer.json()["detail"]


def test_an_explanation_needs_a_plan_that_was_made(client: TestClient) -> None:
    waiting = client.post("/v1/plans", json=TINY_REQUEST).json()["id"]
    answer = client.post("/v1/explanations", json={"plan": waiting, "parameter": "lm_head.weight"})
    assert (answer.status_code, answer.json()["title"]) == (422, "The plan cannot be used")
    assert "is queued and has no plan" in answer.json()["detail"]


def test_one_job_can_be_cancelled_and_asked_for_again(client: TestClient) -> None:
    job = client.post("/v1/comparisons", json=BODIES["sweep"]).json()["id"]
    assert client.delete(f"/v1/comparisons/{job}").json()["status"] == "cancelled"
    assert client.delete(f"/v1/comparisons/{job}").status_code == 409
    again = client.post("/v1/comparisons", json=BODIES["sweep"])
    assert (again.status_code, again.json()["id"], again.json()["status"]) == (202, job, "queued")


def test_a_comparison_is_its_owners_and_counts_among_the_owners_jobs(start: Callable[..., TestClient]) -> None:
    client = start(max_unfinished_per_token=2)
    tokens = TokenStore(client.app.state.service.database)  # type: ignore[attr-defined]
    mine, theirs, admin = (
        {"Authorization": f"Bearer {tokens.create(name, scope)}"}
        for name, scope in (("a", "plan"), ("b", "plan"), ("c", "admin"))
    )
    job = client.post("/v1/comparisons", json=BODIES["sweep"], headers=mine).json()["id"]
    for method, rest in (("GET", ""), ("GET", "/events"), ("DELETE", "")):
        assert client.request(method, f"/v1/comparisons/{job}{rest}", headers=theirs).status_code == 404
    plan = client.post("/v1/plans", json=TINY_REQUEST, headers=mine).json()["id"]
    body = {"plan": plan, "parameter": "lm_head.weight"}
    assert client.post("/v1/explanations", json=body, headers=theirs).status_code == 404
    lists = [client.get("/v1/comparisons", headers=who).json()["jobs"] for who in (mine, theirs, admin)]
    assert [[row["id"] for row in rows] for rows in lists] == [[job], [], [job]]
    assert (lists[0][0]["kind"], lists[0][0]["label"]) == ("sweep", "sweep: hf_config (llama) on 1x4xtoy")
    assert client.post("/v1/comparisons", json=BODIES["pareto"], headers=mine).status_code == 429


def test_an_idempotency_key_is_for_one_comparison(client: TestClient) -> None:
    key = {"Idempotency-Key": "k"}
    job = client.post("/v1/comparisons", json=BODIES["sweep"], headers=key).json()["id"]
    client.delete(f"/v1/comparisons/{job}")
    again = client.post("/v1/comparisons", json=BODIES["sweep"], headers=key).json()
    assert (again["id"], again["status"]) == (job, "cancelled"), "sent again, not asked again"
    assert client.post("/v1/comparisons", json=BODIES["pareto"], headers=key).status_code == 422
    assert client.post("/v1/plans", json=TINY_REQUEST, headers=key).status_code == 422


def test_the_body_of_a_comparison_is_no_plan_request_although_it_was_answered(server: Server) -> None:
    job = post(server, "/v1/comparisons", BODIES["pareto"]).json()["id"]
    until_ended(server, "/v1/comparisons", job)
    for _ in range(2):
        assert post(server, "/v1/comparisons", BODIES["pareto"]).status_code == 200
    assert post(server, "/v1/plans", BODIES["pareto"]).status_code == 422
