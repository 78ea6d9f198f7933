"""Who may do what, how often, and what nobody may: the service in this process, with nobody at work."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import logging
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from fastapi.testclient import TestClient
from sqlalchemy import event
from support.small_models import TINY_REQUEST

from api.http.auth import RateLimit
from api.http.serve import ServeError, serve
from api.jobs.logs import configure_logs
from api.jobs.store import JobStore
from api.jobs.tokens import TokenStore
from api.requests.schemas import PlanRequest
from planner.errors import JobError

PROBLEM = "application/problem+json"
Scopes = dict[str, str]


@pytest.fixture
def client(start: Callable[..., TestClient]) -> TestClient:
    return start()


def tokens_of(client: TestClient) -> TokenStore:
    return TokenStore(service(client).database)


def service(client: TestClient) -> Any:
    return client.app.state.service  # type: ignore[attr-defined]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def headers(client: TestClient) -> dict[str, dict[str, str]]:
    """The headers of a token of each scope, and of a second one that may plan."""
    tokens = tokens_of(client)
    found = {scope: bearer(tokens.create(scope, scope)) for scope in ("read", "plan", "admin")}
    return {**found, "other": bearer(tokens.create("other", "plan")), "nobody": {}}


def submit(client: TestClient, headers: dict[str, str], **change: Any) -> Any:
    return client.post("/v1/plans", json={**TINY_REQUEST, **change}, headers=headers)


WAYS = [
    *(
        (method, f"/v1/{jobs}{path}", scope)
        for jobs in ("plans", "comparisons", "explanations", "checks")
        for method, path, scope in (
            ("GET", "", "read"),
            ("GET", "/" + "0" * 32, "read"),
            ("GET", "/" + "0" * 32 + "/events", "read"),
            ("POST", "", "plan"),
            ("DELETE", "/" + "0" * 32, "plan"),
        )
    ),
    *(
        ("GET", "/v1/plans/" + "0" * 32 + path, "read")
        for path in ("/view", "/request", "/trace", "/report", "/export")
    ),
    ("GET", "/v1/models", "read"),
    ("GET", "/v1/clusters", "read"),
    ("GET", "/metrics", "read"),
    ("POST", "/v1/estimates", "read"),
    ("POST", "/v1/plans/diff", "read"),
]


@pytest.mark.parametrize(("method", "path", "scope"), WAYS)
def test_every_way_needs_a_token_of_its_scope(
    client: TestClient, headers: dict[str, dict[str, str]], method: str, path: str, scope: str
) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.headers["content-type"]) == (401, PROBLEM)
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert client.request(method, path, headers=bearer("sp_" + "0" * 16 + "_" + "a" * 43)).status_code == 401
    assert client.request(method, path, headers={"Authorization": "Basic eDp5"}).status_code == 401
    assert (client.request(method, path, headers=headers["read"]).status_code == 403) == (scope == "plan")
    assert client.request(method, path, headers=headers["plan"]).status_code not in {401, 403}
    assert client.request(method, path, headers=headers["admin"]).status_code not in {401, 403}


def test_every_way_of_the_document_is_guarded_or_meant_not_to_be(client: TestClient) -> None:
    described = client.get("/openapi.json").json()["paths"]
    ways = {(method.upper(), path) for path, methods in described.items() for method in methods}
    guarded = {(method, path.replace("0" * 32, "{job_id}")) for method, path, _ in WAYS}
    assert ways - guarded == {("GET", "/healthz"), ("GET", "/readyz")}


def test_revoked_token_is_refused_at_once(client: TestClient, headers: dict[str, dict[str, str]]) -> None:
    assert client.get("/v1/plans", headers=headers["plan"]).status_code == 200
    tokens_of(client).revoke(headers["plan"]["Authorization"].split("_")[1])
    assert client.get("/v1/plans", headers=headers["plan"]).status_code == 401


def test_nobody_learns_of_the_jobs_of_others(client: TestClient, headers: dict[str, dict[str, str]]) -> None:
    mine = submit(client, headers["plan"]).json()["id"]
    theirs = submit(client, headers["other"]).json()["id"]
    assert mine != theirs
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        answer = client.request(method, f"/v1/plans/{mine}{path}", headers=headers["other"])
        assert answer.status_code == 404
    assert (
        client.post("/v1/plans/diff", json={"left": mine, "right": mine}, headers=headers["other"]).status_code == 404
    )
    listed = [client.get("/v1/plans", headers=headers[who]).json()["jobs"] for who in ("plan", "other", "admin")]
    assert [{job["id"] for job in jobs} for jobs in listed] == [{mine}, {theirs}, {mine, theirs}]
    assert client.delete(f"/v1/plans/{mine}", headers=headers["admin"]).json()["status"] == "cancelled"


def test_idempotency_keys_are_each_owners_own(client: TestClient, headers: dict[str, dict[str, str]]) -> None:
    key = {"Idempotency-Key": "k"}
    first = submit(client, {**headers["plan"], **key}).json()["id"]
    assert submit(client, {**headers["other"], **key}).json()["id"] != first
    client.delete(f"/v1/plans/{first}", headers=headers["plan"])
    again = submit(client, {**headers["plan"], **key})
    assert (again.json()["id"], again.json()["status"]) == (first, "cancelled"), "sent again, not asked again"
    assert submit(client, headers["plan"]).json()["status"] == "queued"
    other = submit(client, {**headers["plan"], **key}, seq=64)
    assert (other.status_code, other.json()["title"]) == (422, "The Idempotency-Key cannot be used")


def test_too_many_requests_are_told_when_to_come_again(start: Callable[..., TestClient]) -> None:
    client = start(requests_per_s=0.01, requests_burst=3)
    one, two = (bearer(tokens_of(client).create(name, "read")) for name in "ab")
    answers = [client.get("/v1/plans", headers=one) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert 90 <= int(answers[-1].headers["retry-after"]) <= 101
    assert client.get("/v1/plans", headers=two).status_code == 200


@pytest.mark.parametrize("is_cached", [False, True], ids=["looked up", "cached"])
def test_submission_is_one_request_of_an_allowed_caller(start: Callable[..., TestClient], is_cached: bool) -> None:
    """Whether its answer is in memory or not, it counts once, and is for those alone who may have it."""
    client = start(requests_per_s=0.01, requests_burst=3)
    tokens = tokens_of(client)
    mine, other, reader = (
        bearer(tokens.create(name, scope)) for name, scope in (("a", "plan"), ("b", "plan"), ("c", "read"))
    )
    content = json.dumps(TINY_REQUEST).encode()
    if is_cached:
        owner = mine["Authorization"].split("_")[1]
        service(client).answers.put(owner, content, "0" * 32, b'{"status": "succeeded"}')

    def post(headers: dict[str, str], **change: Any) -> Any:
        return client.post(
            "/v1/plans", content=content, headers={"Content-Type": "application/json", **headers}, **change
        )

    first = post(mine)
    assert (first.status_code, first.json()["status"]) == ((200, "succeeded") if is_cached else (202, "queued"))
    assert post(other).json()["status"] == "queued"
    assert post(reader).status_code == 403
    assert post(mine, params={"wait": "no number"}).status_code == 422
    assert [post(mine).status_code for _ in range(2)] == [first.status_code, 429]
    tokens.revoke(mine["Authorization"].split("_")[1])
    assert post(mine).status_code == 401


def test_bucket_fills_again() -> None:
    limit = RateLimit(per_s=2.0, burst=2)
    assert [limit.wait_s("x", 0.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    assert [limit.wait_s("x", 0.5), limit.wait_s("x", 0.5)] == [0.0, 0.5]
    assert [limit.wait_s("x", 100.0) for _ in range(3)] == [0.0, 0.0, 0.5]


def test_one_token_cannot_fill_the_queue(start: Callable[..., TestClient]) -> None:
    client = start(max_unfinished_per_token=2)
    mine, other = (bearer(tokens_of(client).create(name, "plan")) for name in "ab")
    answers = [submit(client, mine, seq=seq) for seq in (8, 16, 24)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert answers[-1].headers["retry-after"]
    assert submit(client, other, seq=24).status_code == 202


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""])
def test_open_server_answers_to_its_own_names_only(client: TestClient, host: str) -> None:
    assert client.get("/v1/plans", headers={"Host": host}).status_code == 403
    assert client.get("/v1/plans", headers={"Host": "localhost:8000"}).status_code == 200
    assert client.get("/v1/plans", headers={"Host": "[::1]:8000"}).status_code == 200


def test_open_server_listens_on_loopback_only(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="no API tokens"):
        serve({"host": "0.0.0.0", "port": 0, "data_dir": tmp_path})


def test_form_of_another_site_is_no_request(client: TestClient) -> None:
    body = json.dumps(TINY_REQUEST)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        answer = client.post("/v1/plans", content=body, headers={"Content-Type": kind})
        assert (answer.status_code, answer.headers["content-type"]) == (415, PROBLEM)


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("/tmp/shardplan-was-unpickled"),)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(_Bomb()),
        json.dumps({**TINY_REQUEST, "model": base64.b64encode(pickle.dumps(_Bomb())).decode()}).encode(),
        gzip.compress(b"0" * 50_000_000),
        zlib.compress(b"[" * 50_000_000),
    ],
    ids=["pickle", "pickle as a name", "gzip bomb", "zlib bomb"],
)
@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate"])
def test_nothing_is_unpickled_or_inflated(client: TestClient, content: bytes, encoding: str) -> None:
    kind = {"Content-Type": "application/json", "Content-Encoding": encoding}
    answer = client.post("/v1/plans", content=content, headers=kind)
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
    assert not Path("/tmp/shardplan-was-unpickled").exists()
    assert service(client).store.counts() == {}


@pytest.mark.parametrize("opening", [b"[", b'{"model":', b'{"model": {"hf_config": '])
@pytest.mark.parametrize("nbytes", [900_000, 100_000_000])
def test_deeply_nested_json_is_refused_at_once(client: TestClient, opening: bytes, nbytes: int) -> None:
    body = opening * (nbytes // len(opening))
    answer = client.post("/v1/plans", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == (413 if nbytes > 1_000_000 else 422)
    assert answer.headers["content-type"] == PROBLEM


PATHS = ["../../etc/passwd", "/etc/passwd", "..%2f..%2fetc", "file:///etc/passwd", "gpt2\x00.json", "presets/../gpt2"]


@pytest.mark.parametrize("name", PATHS)
def test_names_are_no_paths(client: TestClient, name: str) -> None:
    for change in ({"model": name}, {"cluster": name}, {"cluster": {"device": name, "devices_per_node": 4}}):
        answer = submit(client, {}, **change)
        assert answer.status_code == 422
        assert "root:" not in answer.text
    for way in ("/v1/plans/{}", "/v1/plans/{}/events"):
        assert client.get(way.format(name.replace("\x00", "%00"))).status_code in {404, 422}
    assert client.post("/v1/plans/diff", json={"left": name, "right": name}).status_code == 404
    estimate = {"model": name, "cluster": "1x4xtoy", "mesh": "tp=4"}
    assert client.post("/v1/estimates", json=estimate).status_code == 422


@pytest.mark.parametrize("given", ['a\n{"event": "forged"}', "a b", "x" * 65, "é", '"', "\x1b[31m"])
def test_request_ids_cannot_write_log_lines(client: TestClient, given: str, capfd: pytest.CaptureFixture[str]) -> None:
    before, handlers = structlog.get_config(), logging.getLogger().handlers
    configure_logs()
    try:
        answer = client.get("/v1/plans/%0a{%22event%22:%22forged%22}", headers={"X-Request-ID": given.encode()})
    finally:
        structlog.configure(**before)
        logging.basicConfig(handlers=handlers, force=True)
    assert answer.headers["x-request-id"].isalnum()
    assert answer.headers["x-request-id"] != given
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert {line["event"] for line in lines} == {"request"}
    assert client.get("/healthz", headers={"X-Request-ID": "ours-1.a"}).headers["x-request-id"] == "ours-1.a"


def test_database_that_has_no_room_is_a_503_and_accepts_nothing(client: TestClient) -> None:
    def fill(connection: Any) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")

    event.listen(service(client).database.engine, "begin", fill)
    answers = [submit(client, {}, seq=8 * n, pins=["lm_head.weight=R" + " " * 900] * 100) for n in range(1, 9)]
    assert answers[-1].status_code == 503
    assert answers[-1].headers["retry-after"]
    assert client.get("/healthz").status_code == 200
    accepted = [answer.json()["id"] for answer in answers if answer.status_code == 202]
    assert set(service(client).store.waiting()) == set(accepted)
    event.remove(service(client).database.engine, "begin", fill)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 10**400},
        {"hidden_size": 10**200},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_hidden_layers": -1},
        {"vocab_size": 10**400},
        {"vocab_size": "many"},
    ],
    ids=str,
)
def test_dimensions_that_cannot_be_are_no_fault_of_ours(client: TestClient, change: dict[str, Any]) -> None:
    model = {"hf_config": {**TINY_REQUEST["model"]["hf_config"], **change}}
    answer = client.post("/v1/estimates", json={"model": model, "cluster": "1x4xtoy", "mesh": "tp=4"})
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
    assert len(answer.text) < 5000


@pytest.mark.parametrize(
    "change",
    [
        {"mesh": "dp=²"},
        {"mesh": "dp=٤"},
        {"mesh": None, "cluster": {"nodes": "100000000", "devices_per_node": 4, "device": "toy"}},
        {"mesh": None, "cluster": {"nodes": 1e9, "devices_per_node": 4, "device": "toy"}},
        {"mesh": None, "cluster": "100000000x4xtoy"},
    ],
    ids=str,
)
def test_numbers_that_are_none_or_too_large_are_refused(client: TestClient, change: dict[str, Any]) -> None:
    answer = submit(client, {}, **change)
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
    estimate = {"model": "gpt2", "cluster": "1x4xtoy", "mesh": "dp=4", "seq": 64}
    changed = {name: value for name, value in change.items() if value is not None}
    assert client.post("/v1/estimates", json={**estimate, **changed}).status_code == 422


def test_numbers_of_thousands_of_digits_are_no_fault_of_ours(client: TestClient) -> None:
    digits = "9" * 5000
    plan = {"format_version": 1, "mesh": {"names": ["dp"], "shape": [4], "device": "cuda"}}
    answer = client.post("/v1/plans/diff", json={"left": {**plan, "plan": {"a": [f"S({digits})"]}}, "right": plan})
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
    length = {"Content-Type": "application/json", "Content-Length": digits}
    assert client.post("/v1/plans", content=b"{}", headers=length).status_code == 413
    job = submit(client, {}).json()["id"]
    client.delete(f"/v1/plans/{job}")
    events = client.get(f"/v1/plans/{job}/events", headers={"Last-Event-ID": digits})
    assert (events.status_code, events.text.count("data:")) == (200, 2), "as from one that is none: from the first"


def test_streams_of_clients_that_left_at_once_are_given_back(start: Callable[..., TestClient]) -> None:
    client = start(max_streams=1)
    job = submit(client, {}).json()["id"]
    path = f"/v1/plans/{job}/events"
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"http_version": "1.1", "headers": [(b"host", b"127.0.0.1")], "asgi": {"spec_version": "2.3"}}

    async def left() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def slowly(message: Any) -> None:
        await asyncio.sleep(0)  # as a server does whose buffer is full

    for _ in range(3):
        asyncio.run(client.app(dict(scope), left, slowly))  # type: ignore[arg-type, call-arg, func-returns-value]
    client.delete(f"/v1/plans/{job}")
    assert client.get(path).status_code == 200


def test_label_is_text_that_every_database_keeps(client: TestClient) -> None:
    model = {"hf_config": {**TINY_REQUEST["model"]["hf_config"], "model_type": "a\x00b\n"}}
    assert submit(client, {}, model=model).status_code == 202
    assert client.get("/v1/plans").json()["jobs"][0]["label"] == "hf_config (a?b?) on 1x4xtoy"


def test_sqlite_is_in_the_data_folder_where_no_second_server_finds_it(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="data_dir"):
        serve({"database_url": f"sqlite:///{tmp_path / 'jobs.sqlite3'}"})


def test_page_of_jobs_goes_on_where_it_ended(client: TestClient) -> None:
    ids = [submit(client, {}, seq=seq).json()["id"] for seq in (8, 16, 24)]
    first = client.get("/v1/plans?limit=2").json()
    second = client.get(f"/v1/plans?limit=2&before={first['next']}").json()
    assert [job["id"] for job in first["jobs"] + second["jobs"]] == ids[::-1]
    assert second["next"] is None
    assert {job["label"] for job in first["jobs"]} == {"hf_config (llama) on 1x4xtoy"}
    assert client.get("/v1/plans?status=cancelled").json()["jobs"] == []
    for query in ("limit=0", "limit=1000", "status=lost", "before=x", "before=99999999999999999999"):
        assert client.get(f"/v1/plans?{query}").status_code == 422


def test_requests_are_stored_as_they_were_meant(client: TestClient) -> None:
    job = submit(client, {}).json()["id"]
    store: JobStore = service(client).store
    stored = store.get(job)
    assert stored is not None
    assert PlanRequest.model_validate(stored.request) == PlanRequest.model_validate(TINY_REQUEST)
