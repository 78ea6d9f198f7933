"""The service under faults: bodies that do not come, clients that leave, disks without room, revoked tokens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError
from support.postgresql import PostgreSQL
from support.serving import Server, start_server

from api.http import job_news
from api.http.app import create_app
from api.http.work.pool import WorkPool
from api.jobs import database as databases
from api.jobs.events import read_news
from api.jobs.settings import ServerSettings
from api.jobs.startup import open_database
from api.jobs.store import JobStore
from api.jobs.tokens import TokenStore

PROBLEM = "application/problem+json"
IDLE = {"SHARDPLAN_WORKERS": "0"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that plans nothing, and waits a second for the head and the body of a request."""
    folder = tmp_path_factory.mktemp("faults")
    # sitecustomize runs before the server does
    limits = ("api.http.bodies", "_BODY_S"), ("api.http.connection", "_HEAD_S")
    text = "".join(f"import {module}\n{module}.{name} = 1.0\n" for module, name in limits)
    (folder / "sitecustomize.py").write_text(text)
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    running = start_server(folder / "data", PYTHONPATH=path, **IDLE)
    yield running
    running.stop()


def connected(server: Server, head: str) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(head.replace("\n", "\r\n").encode())
    return connection


def logged(server: Server, request_id: str) -> dict[str, Any]:
    """Return the log line of a request, once it is there."""
    pause = threading.Event()
    for _ in range(100):
        for line in map(json.loads, server.log.read_text().splitlines()):
            if line.get("request") == request_id and line["event"] == "request":
                found: dict[str, Any] = line
                return found
        pause.wait(0.05)
    raise AssertionError(f"request {request_id} is not in the log")


HEAD = "POST {path} HTTP/1.1\nHost: 127.0.0.1\nContent-Type: application/json\nX-Request-ID: {id}\n"
GET = "GET /healthz HTTP/1.1\nHost: 127.0.0.1\n"


@pytest.mark.parametrize("path", ["/v1/plans", "/v1/estimates", "/v1/plans/diff"])
@pytest.mark.parametrize("body", ["Content-Length: 100\n\n{", "Transfer-Encoding: chunked\n\n1\n{\n"])
def test_body_that_does_not_come_is_answered_and_the_connection_closed(server: Server, path: str, body: str) -> None:
    with connected(server, HEAD.format(path=path, id="late") + body) as connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in head.lower()
    assert f"content-type: {PROBLEM}".encode() in head.lower()
    problem = json.loads(content)
    assert (problem["status"], problem["title"]) == (408, "The body did not come")
    assert "within 1 s" in problem["detail"]


@pytest.mark.parametrize("head", ["", "GET /healthz HT", f"{GET}X-A: 1"])
def test_connection_whose_request_does_not_come_is_closed(server: Server, head: str) -> None:
    with connected(server, head) as connection:
        assert connection.recv(65536) == b""
    if head:  # the second request on a connection
        with connected(server, f"{GET}\n{head}") as connection:
            assert b"".join(iter(lambda: connection.recv(65536), b"")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("head", ["", "GET /", f"{GET}X-A: ", GET + "A: 1\n" * 9000])
def test_head_of_a_request_without_end_is_refused(server: Server, head: str) -> None:
    with connected(server, head) as connection, suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(100):
            connection.sendall(b"a" * 65536)
        raise AssertionError("6 MB were read")


@pytest.mark.parametrize("path", ["/v1/plans", "/v1/comparisons", "/v1/estimates"])
def test_client_that_leaves_amid_its_body_is_no_fault_of_ours(server: Server, path: str) -> None:
    request_id = path.replace("/", ".")
    connected(server, HEAD.format(path=path, id=request_id) + "Content-Length: 100\n\n{").close()
    assert logged(server, request_id)["status"] == 499
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "request failed" not in log


def test_document_says_that_a_body_may_be_late(server: Server) -> None:
    paths = httpx2.get(f"{server.url}/openapi.json").json()["paths"]
    for methods in paths.values():
        for operation in methods.values():
            assert ("408" in operation["responses"]) == ("requestBody" in operation)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_answer_to_head(server: Server, path: str) -> None:
    answer = httpx2.head(server.url + path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == httpx2.get(server.url + path).headers["content-length"]
    refused = httpx2.post(server.url + path)
    assert (refused.status_code, set(refused.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
    assert set(httpx2.get(f"{server.url}/openapi.json").json()["paths"][path]) == {"get"}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TestClient]]:
    """A function that starts the service in this process, without the processes that read requests."""
    monkeypatch.setattr(WorkPool, "start", lambda pool: None)
    monkeypatch.setattr(WorkPool, "is_ready", True)
    clients: list[TestClient] = []

    def start_app(**settings: Any) -> TestClient:
        app = create_app(ServerSettings(**{"data_dir": tmp_path, "workers": 0, **settings}))
        clients.append(TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False))
        return clients[-1].__enter__()

    yield start_app
    for client in clients:
        client.__exit__(None, None, None)


def service(client: TestClient) -> Any:
    return client.app.state.service  # type: ignore[attr-defined]


def test_a_full_disk_is_not_ready(start: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch) -> None:
    client = start()
    assert client.get("/readyz").json() == {"status": "ready", "database": "sqlite"}
    monkeypatch.setattr(databases, "_ROOM_BYTES", 10**18)
    answer = client.get("/readyz")
    assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM)
    assert "disk is full" in answer.json()["detail"]
    assert client.head("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_small_disk_that_is_filled_is_not_ready(tmp_path: Path, start: Callable[..., TestClient]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        client = start(data_dir=disk / "data")
        assert client.get("/readyz").status_code == 200
        (disk / "fill").write_bytes(b"x" * 20_000_000)
        assert client.get("/readyz").status_code == 503
        (disk / "fill").unlink()
        assert client.get("/readyz").status_code == 200
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_check_that_hangs_is_a_503_within_two_seconds_and_holds_one_thread(start: Callable[..., TestClient]) -> None:
    client = start()
    released = threading.Event()
    checks: list[int] = []

    def hang() -> None:
        checks.append(1)
        released.wait(30)
        raise OperationalError("", {}, Exception())

    service(client).database.check = hang
    for _ in range(3):
        since = time.monotonic()
        answer = client.get("/readyz")
        assert time.monotonic() - since < 2.0
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "did not answer within 1 s" in answer.json()["detail"]
    assert len(checks) == 1
    del service(client).database.check
    released.set()
    pause = threading.Event()
    for _ in range(100):
        if client.get("/readyz").status_code == 200:
            break
        pause.wait(0.05)
    assert client.get("/readyz").status_code == 200


def follow(server: Server, job: str, token: str, seen: list[str]) -> threading.Thread:
    """Return the thread that follows a job until its stream ends."""

    def read() -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with httpx2.stream("GET", f"{server.url}/v1/plans/{job}/events", headers=headers, timeout=60) as stream:
            seen.extend(stream.iter_lines())

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_streams_end_soon_after_their_token_is_revoked(run_server: Callable[..., Server], tmp_path: Path) -> None:
    server = run_server(tmp_path / "data", **IDLE)
    database = open_database(ServerSettings(data_dir=tmp_path / "data"))
    job = JobStore(database).add("f", {}).id
    opened: list[str] = []
    mine: list[str] = []
    others: list[str] = []
    of_nobody = follow(server, job, "", opened)
    tokens = TokenStore(database)
    texts = [tokens.create(name, "admin") for name in "ab"]
    mine_alone, anothers = ({"Authorization": f"Bearer {text}"} for text in texts)
    of_nobody.join(timeout=10)
    assert not of_nobody.is_alive(), "from the first token on, nobody may follow without one"
    streams = [follow(server, job, text, seen) for text, seen in zip(texts, (mine, others), strict=True)]
    assert httpx2.get(f"{server.url}/v1/plans/{job}", headers=mine_alone).is_success
    tokens.revoke(texts[0].split("_")[1])
    assert httpx2.get(f"{server.url}/v1/plans/{job}", headers=mine_alone).status_code == 401
    streams[0].join(timeout=10)
    assert not streams[0].is_alive()
    assert streams[1].is_alive()
    assert httpx2.delete(f"{server.url}/v1/plans/{job}", headers=anothers).is_success
    streams[1].join(timeout=10)
    assert not streams[1].is_alive()
    assert any("cancelled" in line for line in others)
    database.close()
    assert "Traceback" not in server.log.read_text()


def test_a_stream_outlives_a_database_that_is_away(
    start: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start()
    job = service(client).store.add("f", {}).id
    client.delete(f"/v1/plans/{job}")
    away = [1, 1]

    def read_or_not(*arguments: Any) -> Any:
        if away:
            away.pop()
            raise OperationalError("", {}, Exception())
        return read_news(*arguments)

    monkeypatch.setattr(job_news, "read_news", read_or_not)
    monkeypatch.setattr(job_news, "_AWAY_S", 0.05)
    assert "cancelled" in client.get(f"/v1/plans/{job}/events").text
    assert not away


@pytest.mark.slow
def test_a_frozen_postgresql_is_not_ready_and_does_not_keep_the_server_from_ending(
    postgresql: PostgreSQL, tmp_path: Path, run_server: Callable[..., Server]
) -> None:
    url = postgresql.create(f"frozen{time.time_ns()}")
    server = run_server(tmp_path / "data", SHARDPLAN_DATABASE_URL=url)
    assert httpx2.get(f"{server.url}/readyz", timeout=30).status_code == 200
    with frozen(postgresql):
        waiting = [threading.Thread(target=ask, args=(server,)) for _ in range(3)]
        for thread in waiting:
            thread.start()
        for _ in range(3):
            since = time.monotonic()
            answer = httpx2.get(f"{server.url}/readyz", timeout=30)
            assert time.monotonic() - since < 2.0
            assert answer.status_code == 503
        assert httpx2.get(f"{server.url}/healthz", timeout=2).status_code == 200
        since = time.monotonic()
        server.stop()
        assert time.monotonic() - since < 15.0
        for thread in waiting:
            thread.join()


@pytest.mark.slow
def test_requests_to_a_frozen_postgresql_are_answered_and_it_is_used_again(
    postgresql: PostgreSQL, tmp_path: Path, run_server: Callable[..., Server]
) -> None:
    url = postgresql.create(f"frozen{time.time_ns()}")
    server = run_server(tmp_path / "data", SHARDPLAN_DATABASE_URL=url)
    assert httpx2.get(f"{server.url}/v1/plans", timeout=30).status_code == 200
    with frozen(postgresql):
        answer = httpx2.get(f"{server.url}/v1/plans", timeout=60)
        assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM)
    pause = threading.Event()
    for _ in range(100):
        if httpx2.get(f"{server.url}/readyz", timeout=30).status_code == 200:
            break
        pause.wait(0.1)
    assert httpx2.get(f"{server.url}/v1/plans", timeout=30).status_code == 200
    assert "Traceback" not in server.log.read_text()


@contextmanager
def frozen(postgresql: PostgreSQL) -> Iterator[None]:
    """Stop all processes of PostgreSQL during the block, so that it answers nothing and closes nothing."""
    main = psutil.Process(postgresql.process.pid)
    processes = [main, *main.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def ask(server: Server) -> None:
    """Ask for the jobs; the server may end before it answers."""
    with suppress(httpx2.HTTPError):
        httpx2.get(f"{server.url}/v1/plans", timeout=60)
