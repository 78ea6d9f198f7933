"""The OpenAPI document: whatever it allows to be sent is answered as it says, and never with a fault of ours.

Schemathesis draws the requests: a few in each run, thousands with ``pytest tests/api/http/test_openapi.py -m slow``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from support.serving import Server, start_server

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
)
CAN_BE = {"model": "gpt2", "cluster": "1x4xtoy", "mesh": "tp=4", "batch": 8, "seq": 16}
PLAN = {"format_version": 1, "mesh": {"names": ["dp"], "shape": [4], "device": "cuda"}}
CAN_BE_EXPLAINED = {"plan": {**PLAN, "cluster": {"device": "toy", "devices_per_node": 4}}, "model": "gpt2"}
ROUTES = 32
IN_CI, ALL = 8, 500
"""Cases for each of the routes that take any input."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO")


@pytest.fixture(scope="module")
def idle_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that plans nothing, however much is asked of it."""
    queue = {"SHARDPLAN_MAX_QUEUED": "1000000", "SHARDPLAN_MAX_UNFINISHED_PER_TOKEN": "1000000"}
    running = start_server(tmp_path_factory.mktemp("data"), SHARDPLAN_WORKERS="0", **queue)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def described(idle_server: Server) -> Any:
    found = schemathesis.openapi.from_url(f"{idle_server.url}/openapi.json")

    @found.hook
    def map_body(context: Any, body: Any) -> Any:
        """Let every second body say what can be: what comes after the first faults is reached too."""
        if not isinstance(body, dict) or len(str(body)) % 2:
            return body
        if "left" in body:
            return {"left": PLAN, "right": PLAN}
        if "parameter" in body:
            return {**body, **CAN_BE_EXPLAINED}
        if isinstance(body.get("request"), dict):
            return {"kind": body.get("kind"), "request": {"model": "gpt2", "cluster": "1x4xtoy", "batch": 8, "seq": 16}}
        kept = {name: value for name, value in body.items() if name not in {"ac", "schedule", "optimizer", "pins"}}
        return {**kept, **CAN_BE} if "cluster" in body else body

    @found.hook
    def map_query(context: Any, query: Any) -> Any:
        """Let no answer wait for a job that nobody plans."""
        waits = isinstance(query, dict) and isinstance(query.get("wait"), (int, float)) and 0 < query["wait"] <= 60
        return {**query, "wait": 0.01} if waits else query

    return found


CHECKED = {"deadline": None, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}


def check(described: Any, cases: int) -> int:
    """Send up to so many requests down each route (a route without input knows one); return how many were sent."""
    routes = sent = 0
    for found in described.get_all_operations():
        operation = found.ok()

        @settings(max_examples=cases, **CHECKED)
        @given(case=operation.as_strategy())
        def answered(case: Any) -> None:
            nonlocal sent
            sent += 1
            case.call_and_validate(checks=CHECKS)

        answered()
        routes += 1
    assert routes == ROUTES
    return sent


def test_some_requests_are_answered_as_the_document_says(described: Any) -> None:
    assert check(described, IN_CI) > 5 * IN_CI


def test_a_method_that_is_not_there_is_answered_with_those_that_are(idle_server: Server) -> None:
    paths = httpx2.get(f"{idle_server.url}/openapi.json").json()["paths"]
    wrong = {}
    for path, described in paths.items():
        there = {method.upper() for method in described}
        if path == "/v1/plans/diff":
            there |= {"GET", "DELETE"}  # of a job of this name
        for method in set(METHODS) - there - {"FOO"}:  # uvicorn refuses what is no method
            answer = httpx2.request(method, idle_server.url + path.replace("{job_id}", "0" * 32))
            named = set(re.findall(r"[A-Z]+", answer.headers.get("allow", ""))) - {"HEAD"}
            if answer.status_code != 405 or named != there:
                wrong[method, path] = (answer.status_code, named)
    probes = {("HEAD", "/healthz"), ("HEAD", "/readyz")}  # as some load balancers ask
    assert not wrong.keys() - probes, wrong


@pytest.mark.slow
def test_two_thousand_requests_are_answered_as_the_document_says(described: Any) -> None:
    assert check(described, ALL) >= 2000
