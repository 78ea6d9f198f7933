"""What is drawn of a plan, over HTTP: view, trace, report, and the page's own files."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from support.serving import Server


@pytest.fixture(scope="module")
def job(server: Server) -> dict[str, Any]:
    from support.small_models import TINY_REQUEST

    answer = httpx2.post(f"{server.url}/v1/plans", json=TINY_REQUEST, timeout=30)
    return server.until_ended(answer.json()["id"])


def test_the_view_has_the_plan_and_its_request(server: Server, job: dict[str, Any]) -> None:
    view = httpx2.get(f"{server.url}/v1/plans/{job['id']}/view").raise_for_status().json()
    assert view["id"] == job["id"]
    assert view["time"]["step_s"] == job["plan"]["estimate"]["step_time_s"]
    assert view["memory"]["peak_bytes"] == job["plan"]["estimate"]["peak_memory_bytes"]
    assert view["request"]["batch"] == 8


def test_trace_and_report_are_downloads_that_cannot_run_on_the_server(server: Server, job: dict[str, Any]) -> None:
    for what, kind in (("trace", "application/json"), ("report", "text/html")):
        answer = httpx2.get(f"{server.url}/v1/plans/{job['id']}/{what}").raise_for_status()
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["content-security-policy"] == "sandbox"


def test_a_trace_of_ranks(server: Server, job: dict[str, Any]) -> None:
    address = f"{server.url}/v1/plans/{job['id']}/trace"
    assert httpx2.get(address, params={"ranks": "0,3"}).status_code == 200
    assert httpx2.get(address, params={"ranks": "9"}).status_code == 422
    assert httpx2.get(address, params={"ranks": "x"}).status_code == 422


def test_no_view_of_what_is_not_there(server: Server) -> None:
    assert httpx2.get(f"{server.url}/v1/plans/{'0' * 32}/view").status_code == 404
    refused = httpx2.post(
        f"{server.url}/v1/plans",
        json={"model": {"hf_config": {"model_type": "llama"}}, "cluster": "1x4xtoy", "batch": 6, "seq": 8},
        timeout=30,
    ).json()
    failed = server.until_ended(refused["id"])
    assert failed["status"] == "failed"
    assert httpx2.get(f"{server.url}/v1/plans/{failed['id']}/request").json()["batch"] == 6
    answer = httpx2.get(f"{server.url}/v1/plans/{failed['id']}/view")
    assert answer.status_code == 409
    assert "failed" in answer.json()["detail"]


@pytest.mark.parametrize("address", ["/", "/plans", f"/plans/{'0' * 32}", "/devices", "/docs"])
def test_every_page_has_a_policy_without_inline_scripts(server: Server, address: str) -> None:
    answer = httpx2.get(f"{server.url}{address}").raise_for_status()
    policy = answer.headers["content-security-policy"]
    scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert "unsafe-inline" not in scripts
    assert "http" not in policy
    assert httpx2.head(f"{server.url}{address}").status_code == 200


def test_static_files_are_typed_and_stay_inside(server: Server) -> None:
    script = httpx2.get(f"{server.url}/static/js/main.js").raise_for_status()
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["x-content-type-options"] == "nosniff"
    assert httpx2.get(f"{server.url}/static/../http/app.py").status_code == 404
    assert httpx2.get(f"{server.url}/static/%2e%2e/http/app.py").status_code == 404
