"""Requests that wait for the end of a job: they get it when it comes, hold no thread, and wait no longer than asked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import HTTPException, Request
from fastapi.testclient import TestClient
from support.small_models import TINY_REQUEST

from api.http.app import create_app
from api.http.job_news import JobNews
from api.http.routes.waiting import until_ended
from api.http.service import Service
from api.jobs.database import Database
from api.jobs.events import OpenStreams
from api.jobs.settings import ServerSettings
from api.jobs.store import JobRecord, JobStore

STREAMS = 50
PLAN = {"estimate": None, "solver": None}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a server that plans nothing by itself."""
    settings = ServerSettings(data_dir=tmp_path_factory.mktemp("data"), workers=0, max_streams=STREAMS)
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as opened:
        while opened.get("/readyz").status_code != 200:  # the processes that check requests start
            time.sleep(0.2)
        yield opened


def store_of(client: TestClient) -> JobStore:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    return service.store


def body(tolerance: float) -> dict[str, Any]:
    return {**TINY_REQUEST, "tolerance": tolerance}


def ended_later(store: JobStore, after_s: float = 0.5) -> threading.Timer:
    """Let a worker end the next job in a while."""

    def end() -> None:
        job = store.claim()
        assert job is not None
        store.succeed(job, PLAN)

    timer = threading.Timer(after_s, end)
    timer.start()
    return timer


def test_a_submission_waits_for_the_plan(client: TestClient) -> None:
    client.post("/v1/plans", json=body(0.01))  # the processes that check requests have started
    ended_later(store_of(client), 0.0).join()
    timer = ended_later(store_of(client), 1.0)
    answer = client.post("/v1/plans", json=body(0.02), params={"wait": 30})
    timer.join()
    assert (answer.status_code, answer.json()["status"], answer.json()["plan"]) == (200, "succeeded", PLAN)


def test_a_read_waits_for_the_end_however_it_comes(client: TestClient) -> None:
    job = client.post("/v1/plans", json=body(0.03)).json()["id"]
    threading.Timer(0.5, store_of(client).cancel, [job]).start()
    began = time.monotonic()
    assert client.get(f"/v1/plans/{job}", params={"wait": 30}).json()["status"] == "cancelled"
    assert 0.4 < time.monotonic() - began < 20


def test_what_does_not_end_in_time_is_answered_as_it_is(client: TestClient) -> None:
    answer = client.post("/v1/plans", json=body(0.04), params={"wait": 0.5})
    assert (answer.status_code, answer.json()["status"], answer.json()["position"]) == (202, "queued", 1)
    assert answer.json()["expected_wait_s"] is None
    store_of(client).claim()
    read = client.get(f"/v1/plans/{answer.json()['id']}", params={"wait": 0.5}).json()
    assert read["status"] == "running"
    assert "position" not in read
    store_of(client).cancel(read["id"])


@pytest.mark.parametrize("wait", ["-1", "61", "nan", "x"])
def test_how_long_may_be_waited(client: TestClient, wait: str) -> None:
    assert client.get(f"/v1/plans/{'0' * 32}", params={"wait": wait}).status_code == 422


def test_those_who_wait_keep_nobody_else_waiting(client: TestClient) -> None:
    """More requests wait than there are threads, and others are answered meanwhile."""
    job = client.post("/v1/plans", json=body(0.05)).json()["id"]
    with ThreadPoolExecutor(STREAMS) as threads:
        waiting = [threads.submit(client.get, f"/v1/plans/{job}", params={"wait": 60}) for _ in range(STREAMS)]
        time.sleep(1.0)
        began = time.monotonic()
        assert client.get(f"/v1/plans/{job}", params={"wait": 60}).json()["status"] == "queued", "no place is left"
        assert client.get("/v1/plans").status_code == 200
        assert time.monotonic() - began < 10
        store_of(client).cancel(job)
        assert {answer.result().json()["status"] for answer in waiting} == {"cancelled"}
    assert client.app.state.service.streams.take(), "the places were given back"  # type: ignore[attr-defined]
    client.app.state.service.streams.give_back()  # type: ignore[attr-defined]


class Client:
    """A request whose client goes after some looks at it."""

    def __init__(self, looks: int = 1_000_000) -> None:
        self.looks = looks

    async def is_disconnected(self) -> bool:
        self.looks -= 1
        return self.looks < 0


async def knows(request: Request) -> bool:
    return True


@pytest.fixture
def waits(tmp_path: Path) -> Iterator[tuple[Service, JobRecord]]:
    """A service with a job that does not end."""
    database = Database(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
    database.migrate()
    store = JobStore(database)
    stopping = asyncio.Event()
    news, guard = JobNews(database, stopping), SimpleNamespace(still_knows=knows)
    parts = SimpleNamespace(store=store, streams=OpenStreams(1), news=news, guard=guard, stopping=stopping)
    yield cast(Service, parts), store.add("f", {"model": "a"})
    database.close()


def wait_for(service: Service, job: JobRecord, client: Client, wait_s: float = 30.0) -> JobRecord:
    return asyncio.run(until_ended(cast(Request, client), service, job, wait_s))


def test_a_client_that_goes_is_not_waited_for(waits: tuple[Service, JobRecord]) -> None:
    began = time.monotonic()
    assert wait_for(*waits, Client(looks=2)) == waits[1]
    assert time.monotonic() - began < 10
    assert waits[0].streams.take()


def test_a_server_that_stops_answers_at_once(waits: tuple[Service, JobRecord]) -> None:
    waits[0].stopping.set()
    assert wait_for(*waits, Client()) == waits[1]


def test_a_job_that_is_deleted_is_not_waited_for(waits: tuple[Service, JobRecord]) -> None:
    gone = JobRecord(**{name: getattr(waits[1], name) for name in waits[1].__slots__} | {"number": 99, "id": "f" * 32})
    assert wait_for(waits[0], gone, Client()) == gone


def test_a_token_that_is_revoked_is_not_waited_for(waits: tuple[Service, JobRecord]) -> None:
    async def knows_no_more(request: Request) -> bool:
        return False

    waits[0].guard.still_knows = knows_no_more  # type: ignore[method-assign]
    with pytest.raises(HTTPException) as refused:
        wait_for(*waits, Client())
    assert refused.value.status_code == 401
    assert waits[0].streams.take()
