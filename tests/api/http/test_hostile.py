"""Hostile bodies and graphs: each is refused as the client's fault, soon, and nothing of it runs."""

from __future__ import annotations

import base64
import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.hostile import (
    BAIT,
    DIGITS,
    JSON,
    LAUGHS,
    Document,
    changed,
    check,
    config,
    graph_body,
    plan,
    relu,
)
from support.small_models import TINY_LLAMA, TINY_REQUEST

from api.http.app import create_app
from api.jobs.settings import ServerSettings
from planner.wire.document import FORMAT, MAX_NBYTES

PROBLEM = "application/problem+json"
SOON_S = 10.0
"""A refusal takes milliseconds, or a second for the largest; the rest is for machines with other work."""

# --- bodies that are refused at once ---------------------------------------------------------------------------------


def deep(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = {"a": inner}
    return inner


def with_text(member: str) -> bytes:
    """Return a request with ``member``, as written, in it."""
    return plan()[:-1] + b", " + member.encode() + b"}"


REFUSED_PLANS: dict[str, bytes] = {
    # no JSON, or JSON that says other things to other readers
    "cut off": plan()[:-1],
    "two documents": plan() * 2,
    "comma too many": plan()[:-1] + b",}",
    "comment": b"/* */" + plan(),
    "single quotes": plan().replace(b'"', b"'"),
    "infinity": with_text('"memory_gb": Infinity'),
    "minus infinity": with_text('"memory_gb": -Infinity'),
    "beyond doubles": with_text('"memory_gb": 1e400'),
    "hexadecimal": with_text('"batch": 0x8'),
    "leading zero": with_text('"batch": 08'),
    "nul byte": plan(model="gpt2").replace(b"gpt2", b"gpt2\x00"),
    "escaped nul": plan(model="gpt2\x00"),
    "lone surrogate": plan(model="gpt2").replace(b"gpt2", b"\\ud800"),
    "encoded surrogate": plan(model="gpt2").replace(b"gpt2", b"\xed\xa0\x80"),
    "overlong": plan(model="gpt2").replace(b"gpt2", b"\xc0\xaf"),
    "utf-16": plan().decode().encode("utf-16"),
    "utf-32": plan().decode().encode("utf-32"),
    "byte order mark": b"\xef\xbb\xbf" + plan(),
    "second of two keys": with_text('"batch": -1'),
    "many unknown keys": json.dumps({**TINY_REQUEST, **{f"k{n}": 0 for n in range(50_000)}}).encode(),
    "numbers only": b"[" + b"0," * 400_000 + b"0]",
    # other types
    "list of requests": json.dumps([TINY_REQUEST] * 3).encode(),
    "model as a number": plan(model=1),
    "model as a list": plan(model=["gpt2"]),
    "batch as a boolean": plan(batch=True),
    "batch as a fraction": plan(batch=8.5),
    "batch of 1e308": plan(batch=1e308),
    "batch of 400 digits": plan(batch=10**400),
    "batch beyond 64 bits": plan(batch=2**64),
    "negative sequence": plan(seq=-(2**63)),
    "memory of 1e308 GB": plan(memory_gb=1e308),
    "no memory": plan(memory_gb=-0.0),
    "pins as an object": plan(pins={"lm_head.weight": "R"}),
    "100,000 pins": plan(pins=["a=R"] * 100_000),
    "nested pins": plan(pins=[[[["a=R"]]]]),
    "techniques of objects": plan(techniques=[{"a": 1}]),
    # names
    "huge name": plan(model="a" * 900_000),
    "expression": plan(model="__import__('os').system('touch /tmp/hostile')"),
    "dunder": plan(model="__class__"),
    "factory": plan(model=f"{BAIT}:run"),
    "module": plan(model=BAIT),
    "python file": plan(model=f"{BAIT}.py"),
    "address": plan(model="https://example.com/config.json"),
    "lookup": plan(model="${jndi:ldap://example.com/a}"),
    "line feed": plan(model="gpt2\n"),
    "template": plan(model="{0.__class__}%s%n"),
    # configs
    "config as a list": plan(model={"hf_config": [TINY_LLAMA]}),
    "config of a path": plan(model={"hf_config": "/etc/passwd"}),
    "config with code": plan(model={"hf_config": TINY_LLAMA, "trust_remote_code": True}),
    "model type as a number": config(model_type=1),
    "a million layers": config(num_hidden_layers=10**6),
    "layers of 400 digits": config(num_hidden_layers=10**400),
    "deep config": config(a=deep(100)),
    "config of dunders": plan(model={"hf_config": {"__class__": "os", "__reduce__": []}}),
    # clusters, meshes
    "negative nodes": plan(cluster={"nodes": -1, "devices_per_node": 4, "device": "toy"}),
    "nodes as a boolean": plan(cluster={"nodes": True, "devices_per_node": 4, "device": "toy"}),
    "nodes of 1e308": plan(cluster={"nodes": 1e308, "devices_per_node": 4, "device": "toy"}),
    "deep cluster": plan(cluster=deep(150)),
    "cluster of a list": plan(cluster=["1x4xtoy"]),
    "device that is a file": plan(cluster={"devices_per_node": 4, "device": {"like": "../toy"}}),
    "negative memory": plan(cluster={"devices_per_node": 4, "device": {"like": "toy", "memory_bytes": -1}}),
    "mesh of 30 digits": plan(mesh="dp=" + "9" * 30),
    "negative mesh": plan(mesh="dp=-2,tp=-2"),
    "axis twice": plan(mesh="dp=2,dp=2"),
    "mesh of 1000 axes": plan(mesh=",".join(f"a{n}=1" for n in range(1000))),
}


def with_digits(body: bytes) -> bytes:
    return body.replace(b"-777", DIGITS.encode())


REFUSED_PLANS |= {
    "layers of 5000 digits": with_digits(config(num_hidden_layers=-777)),
    "width of 5000 digits": with_digits(config(hidden_size=-777)),
    "nodes of 5000 digits": with_digits(plan(cluster={"nodes": -777, "devices_per_node": 4, "device": "toy"})),
    "memory of 5000 digits": with_text(f'"memory_gb": {DIGITS}'),
    "cluster text of 900 digits": plan(cluster="9" * 900 + "x4xtoy"),
}

PLAN = {"format_version": 1, "mesh": {"names": ["dp"], "shape": [4], "device": "cuda"}}


def estimate(**change: Any) -> bytes:
    return json.dumps({"model": "gpt2", "cluster": "1x4xtoy", "mesh": "dp=4", **change}).encode()


def diff(**change: Any) -> bytes:
    return json.dumps({"left": {**PLAN, **change}, "right": PLAN}).encode()


def compare(kind: str, **change: Any) -> bytes:
    return json.dumps({"kind": kind, "request": {"model": "gpt2", "cluster": "1x4xtoy"}, **change}).encode()


def explain(**change: Any) -> bytes:
    return json.dumps({"plan": PLAN, "model": "gpt2", "parameter": "wte.weight", **change}).encode()


REFUSED_ELSEWHERE: dict[str, tuple[str, bytes]] = {
    "estimate for a million ranks": ("/v1/estimates", estimate(mesh="tp=1000000")),
    "estimate of a negative batch": ("/v1/estimates", estimate(batch=-1)),
    "estimate of a factory": ("/v1/estimates", estimate(model=f"{BAIT}:run")),
    "optimizer of code": ("/v1/estimates", estimate(optimizer="__import__('os')")),
    "schedule of a nul": ("/v1/estimates", estimate(schedule="\x00")),
    "recomputed every 10^22": ("/v1/estimates", estimate(ac="full:" + "9" * 22)),
    "diff of numbers": ("/v1/plans/diff", b'{"left": 1, "right": 2}'),
    "diff with a layout of 50,000 axes": ("/v1/plans/diff", diff(plan={"a": ["S(0)"] * 50_000})),
    "diff with a layout of code": ("/v1/plans/diff", diff(plan={"a": ["__import__('os')"]})),
    "diff with a mesh of nothing": ("/v1/plans/diff", diff(mesh={**PLAN["mesh"], "shape": [0]})),  # type: ignore[dict-item]
    "diff of a version to come": ("/v1/plans/diff", diff(format_version=10**10)),
    "diff with deep notes": ("/v1/plans/diff", diff(notes=deep(150))),
    "comparison of no kind": ("/v1/comparisons", compare("__class__")),
    "comparison of 10^9 plans": ("/v1/comparisons", compare("alternatives", count=10**9)),
    "sweep within no time": ("/v1/comparisons", compare("sweep", within_s=-1.0)),
    "sweep of 1000 clusters": ("/v1/comparisons", compare("sweep", devices=[1] * 1000)),
    "batches to 2^60": ("/v1/comparisons", compare("batches", most=2**60)),
    "explanation of a path": ("/v1/explanations", explain(model="/etc/passwd", parameter="../a")),
    "explanation of no job": ("/v1/explanations", explain(plan="0")),
    "YAML of 10^12 texts": ("/v1/checks", check(LAUGHS)),
    "framework of a path": ("/v1/checks", check("a", framework="../bait")),
    "configuration of nuls": ("/v1/checks", check("\x00" * 1000)),
    "configuration of 900 kB": ("/v1/checks", check("a" * 900_000)),
}
OTHER_TYPES: dict[str, str] = {
    "XML": "application/xml",
    "JSON for lines": "application/x-ndjson",
    "pickle": "application/python-pickle",
    "gzip": "application/gzip",
    "two types": "text/plain, application/json",
}


# --- graphs that are refused at once ---------------------------------------------------------------------------------


BROKEN: dict[str, Callable[[Document], object]] = {
    "cycle": lambda d: d["ops"][0].update(args=[{"value": d["ops"][-1]["outputs"][0]}, *d["ops"][0]["args"][1:]]),
    "op that reads itself": lambda d: relu(d).update(args=[{"value": relu(d)["outputs"][0]}]),
    "unknown op": lambda d: relu(d).update(op="aten.no_such_op.default"),
    "op of a module": lambda d: relu(d).update(op=f"{BAIT}.run"),
    "op that is an attribute": lambda d: relu(d).update(op="aten.__class__.__mro__"),
    "op that reads a file": lambda d: relu(d).update(op="aten.from_file.default", args=["/etc/passwd"]),
    "op twice": lambda d: d["ops"].append(d["ops"][-1]),
    "value twice": lambda d: d["values"].append(d["values"][-1]),
    "negative size": lambda d: d["values"][0].update(shape=[-1, 8]),
    "size as a boolean": lambda d: d["values"][0].update(shape=[True, 8]),
    "size of 400 digits": lambda d: d["values"][0].update(shape=[10**400]),
    "sizes whose product overflows": lambda d: d["values"][0].update(shape=[2**40, 2**40]),
    "1000 dims": lambda d: d["values"][0].update(shape=[1] * 1000),
    "value that is not there": lambda d: relu(d).update(args=[{"value": "nowhere"}]),
    "call that is not there": lambda d: relu(d).update(call=10**6),
    "calls in a circle": lambda d: d.update(calls=[[0, 1], [1, 0]]),
    "constant of 400 digits": lambda d: relu(d).update(args=[10**400]),
    "long text": lambda d: relu(d).update(args=["a" * 100_000]),
    "deep lists": lambda d: relu(d).update(args=[json.loads("[" * 100 + "]" * 100)]),
    "code as a member": lambda d: d.update(code="import os"),
    "code as an argument": lambda d: relu(d).update(args=[{"code": "__import__('os')"}]),
    "batch of nothing": lambda d: d["trace"].update(batch=0),
    "parameters without names": lambda d: d.update(parameters=[]),
    "20,000 outputs of an op": lambda d: relu(d).update(outputs=["a"] * 20_000),
}
"""Changes to a document."""


def packed(text: bytes) -> Document:
    return {"format": FORMAT, "zlib": base64.b64encode(zlib.compress(text)).decode()}


NO_GRAPHS: dict[str, Callable[[], object]] = {
    "list": lambda: [1, 2],
    "text": lambda: "graph",
    "other format": lambda: {"format": "pickle", "zlib": ""},
    "no zlib": lambda: {"format": FORMAT, "zlib": "AAAA"},
    "no base64": lambda: {"format": FORMAT, "zlib": "é" * 100},
    "list of zlib": lambda: {"format": FORMAT, "zlib": ["AAAA"]},
    "cut off": lambda: {"format": FORMAT, "zlib": packed(b"{}" * 1000)["zlib"][:-8]},
    "more after it": lambda: {"format": FORMAT, "zlib": base64.b64encode(zlib.compress(b"{}") + b"more").decode()},
    "gzip": lambda: {"format": FORMAT, "zlib": base64.b64encode(gzip.compress(b"{}")).decode()},
    "bomb": lambda: packed(b"[" * (10 * MAX_NBYTES)),
    "bomb of blanks": lambda: packed(b" " * (MAX_NBYTES - 10)),
    "bomb of objects": lambda: packed(b'{"a":' * 3_000_000),
    "bomb of values": lambda: packed(b"[" + b"0," * 1_100_000 + b"0]"),
    "zlib in zlib": lambda: packed(json.dumps(packed(b"{}")).encode()),
    "no UTF-8": lambda: packed(b"\xff\xfe{}"),
}


@pytest.fixture(scope="module")
def client(bait: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """One service for all, with nobody at work: what is accepted waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", bait["PYTHONPATH"], prepend=":")
        patch.syspath_prepend(bait["PYTHONPATH"])
        app = create_app(ServerSettings(data_dir=tmp_path_factory.mktemp("data"), workers=0))
        with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as entered:
            entered.post("/v1/plans", content=b"{}", headers=JSON)  # waits until what checks bodies has started
            yield entered


def assert_refused(client: TestClient, path: str, body: bytes, headers: dict[str, str] = JSON) -> Any:
    started = time.perf_counter()
    answer = client.post(path, content=body, headers=headers)
    assert time.perf_counter() - started < SOON_S
    problem = answer.json()
    assert 400 <= answer.status_code < 500, answer.text[:500]
    assert (answer.headers["content-type"], problem["status"]) == (PROBLEM, answer.status_code)
    assert problem["title"]
    assert problem["detail"]
    return answer


@pytest.mark.parametrize("body", REFUSED_PLANS.values(), ids=REFUSED_PLANS)
def test_a_hostile_plan_request_is_refused(client: TestClient, body: bytes) -> None:
    assert assert_refused(client, "/v1/plans", body).status_code == 422


@pytest.mark.parametrize(("path", "body"), REFUSED_ELSEWHERE.values(), ids=REFUSED_ELSEWHERE)
def test_a_hostile_request_of_another_kind_is_refused(client: TestClient, path: str, body: bytes) -> None:
    assert_refused(client, path, body)


@pytest.mark.parametrize("kind", OTHER_TYPES.values(), ids=OTHER_TYPES)
def test_another_content_type_is_refused(client: TestClient, kind: str) -> None:
    assert assert_refused(client, "/v1/plans", plan(), {"Content-Type": kind}).status_code == 415


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_hostile_graph_is_refused(
    client: TestClient, document: Document, change: Callable[[Document], object]
) -> None:
    answer = assert_refused(client, "/v1/plans", graph_body(changed(document, change)))
    assert answer.json()["type"] == "urn:shardplan:graph-format-error"


@pytest.mark.parametrize("graph", NO_GRAPHS.values(), ids=NO_GRAPHS)
def test_what_is_no_graph_is_refused(client: TestClient, graph: Callable[[], object]) -> None:
    assert assert_refused(client, "/v1/plans", graph_body(graph())).status_code == 422


def test_after_all_that_the_service_works_and_nothing_hostile_was_queued(client: TestClient) -> None:
    assert client.get("/v1/plans").json()["jobs"] == []
    assert client.post("/v1/plans", content=plan(), headers=JSON).status_code == 202
