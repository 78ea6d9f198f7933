"""What clients of a plan that a time limit cut short get: the same, or, when they ask for it, a search for a better."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.small_models import TINY_REQUEST

from api.http.app import create_app
from api.http.response_cache import Answers
from api.http.service import Service
from api.jobs.settings import ServerSettings
from planner.plan.sharding_plan import ShardingPlan

FAULT = {"title": "no", "status": 500, "detail": ""}


def plan(step_time_s: float, status: str = "time-limit") -> dict[str, Any]:
    gap = 0.31 if status == "time-limit" else 0.0
    return {"estimate": {"step_time_s": step_time_s}, "solver": {"status": status, "gap": gap}}


CUT_SHORT, BETTER, PROVED = plan(2.0), plan(1.5), plan(1.4, "optimal")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a server that plans nothing by itself."""
    app = create_app(ServerSettings(data_dir=tmp_path_factory.mktemp("data"), workers=0))
    with TestClient(app, base_url="http://127.0.0.1") as opened:
        while opened.get("/readyz").status_code != 200:  # the processes that check requests start
            time.sleep(0.2)
        yield opened


@pytest.fixture
def service(client: TestClient) -> Service:
    running: Service = client.app.state.service  # type: ignore[attr-defined]
    return running


def solved(service: Service, result: Any) -> None:
    """Let a worker end the job that waits."""
    job = service.store.claim()
    assert job is not None
    assert service.store.succeed(job, result)


def body(tolerance: float) -> dict[str, Any]:
    """Return a request; each test has its own."""
    return {**TINY_REQUEST, "tolerance": tolerance}


def test_a_plan_that_was_cut_short_is_searched_again_when_asked(client: TestClient, service: Service) -> None:
    request = body(0.01)
    job = client.post("/v1/plans", json=request).json()["id"]
    solved(service, CUT_SHORT)
    again = client.post("/v1/plans", json=request)
    assert (again.status_code, again.json()["plan"]) == (200, CUT_SHORT)
    refreshed = client.post("/v1/plans", json=request, params={"refresh": "true"})
    assert (refreshed.status_code, refreshed.json()["id"]) == (202, job), refreshed.text
    assert (refreshed.json()["status"], refreshed.json()["plan"]) == ("queued", CUT_SHORT)
    assert refreshed.json()["position"] == 1
    assert client.get(f"/v1/plans/{job}").json()["plan"] == CUT_SHORT
    solved(service, BETTER)
    for answer in (client.post("/v1/plans", json=request), client.get(f"/v1/plans/{job}")):
        assert (answer.status_code, answer.json()["status"], answer.json()["plan"]) == (200, "succeeded", BETTER)
        assert "position" not in answer.json()


def test_a_proved_plan_is_served_as_it_is(client: TestClient, service: Service) -> None:
    request = body(0.02)
    client.post("/v1/plans", json=request)
    solved(service, PROVED)
    for _ in range(2):
        answer = client.post("/v1/plans", json=request, params={"refresh": "true"})
        assert (answer.status_code, answer.json()["plan"]) == (200, PROVED)


def test_a_search_that_fails_or_is_cancelled_loses_no_plan(client: TestClient, service: Service) -> None:
    request = body(0.03)
    path = f"/v1/plans/{client.post('/v1/plans', json=request).json()['id']}"
    solved(service, CUT_SHORT)
    client.post("/v1/plans", json=request, params={"refresh": "true"})
    job = service.store.claim()
    assert job is not None
    assert client.get(path).json()["status"] == "running"
    service.store.fail(job, FAULT)
    failed = client.get(path).json()
    assert (failed["status"], failed["plan"], failed["error"]) == ("succeeded", CUT_SHORT, FAULT)
    client.post("/v1/plans", json=request, params={"refresh": "true"})
    cancelled = client.delete(path).json()
    assert (cancelled["status"], cancelled["plan"], cancelled["error"]) == ("succeeded", CUT_SHORT, None)


def test_only_answers_that_do_not_change_are_kept_in_memory(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[bytes] = []
    monkeypatch.setattr(Answers, "put", lambda *arguments: kept.append(arguments[-1]))
    request = body(0.04)
    client.post("/v1/plans", json=request)
    solved(service, CUT_SHORT)
    assert client.post("/v1/plans", json=request).status_code == 200
    assert not kept
    client.post("/v1/plans", json=request, params={"refresh": "true"})
    solved(service, PROVED)
    assert client.post("/v1/plans", json=request).json()["plan"] == PROVED
    assert len(kept) == 1


def test_a_key_is_for_one_of_both(client: TestClient, service: Service) -> None:
    request, key = body(0.05), {"Idempotency-Key": "once"}
    job = client.post("/v1/plans", json=request, headers=key).json()["id"]
    solved(service, CUT_SHORT)
    assert client.post("/v1/plans", json=request, headers=key).json()["id"] == job
    assert client.post("/v1/plans", json=request, headers=key, params={"refresh": "true"}).status_code == 422
    anew = {"Idempotency-Key": "twice"}
    for _ in range(2):  # sent again, it is the same search
        assert client.post("/v1/plans", json=request, headers=anew, params={"refresh": "true"}).status_code == 202
    solved(service, CUT_SHORT)
    assert client.post("/v1/plans", json=request, headers=anew, params={"refresh": "true"}).status_code == 200


def test_views_of_the_earlier_plan_go_on(client: TestClient, service: Service, hand_written_plan: ShardingPlan) -> None:
    document = hand_written_plan.to_dict()
    document["solver"] |= {"status": "time-limit", "gap": 0.31}
    request = body(0.06)
    job = client.post("/v1/plans", json=request).json()["id"]
    solved(service, document)
    client.post("/v1/plans", json=request, params={"refresh": "true"})
    assert client.get(f"/v1/plans/{job}/view").status_code == 200
    solved(service, document)


def test_a_time_limit_is_part_of_the_request(client: TestClient, service: Service) -> None:
    jobs = {
        client.post("/v1/plans", json={**body(0.07), "time_limit_s": limit}).json()["id"] for limit in (None, 5, 5.0, 9)
    }
    assert len(jobs) == 3
    asked = client.get(f"/v1/plans/{jobs.pop()}/request").json()
    assert "time_limit_s" in asked
    assert client.post("/v1/plans", json={**body(0.07), "time_limit_s": 0}).status_code == 422


def test_the_server_s_limit_is_ten_minutes(tmp_path: Path) -> None:
    assert ServerSettings(data_dir=tmp_path).job_timeout_s == 600.0
