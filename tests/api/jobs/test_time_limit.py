"""A job over its time limit, in a real server: the best plan so far with its gap, or a failure that says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.serving import Server

from planner.plan.sharding_plan import ShardingPlan

LONG = {"model": "llama-3.1-70b", "cluster": "8x8xh100-sxm-80gb", "batch": 64, "seq": 4096}
"""On two cores a search of twenty seconds, whose first plan takes some three."""


def ended(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    """Return the job of a request once it has ended; nothing else is left to be done then."""
    job = httpx2.post(f"{server.url}/v1/plans", json=request, timeout=30).raise_for_status().json()["id"]
    found = server.until_ended(job)
    assert httpx2.get(f"{server.url}/v1/plans/{job}/events").text.count('{"stage": "running"}') == 1, "it ran once"
    return found


@pytest.mark.slow
def test_search_over_its_time_gives_the_best_plan_so_far_with_its_gap(
    run_server: Callable[..., Server], tmp_path: Path
) -> None:
    # How long a search takes, and its first plan, is the machine's: one of these limits falls between the two.
    for limit_s in ("8", "5", "14", "3", "25"):
        server = run_server(tmp_path / limit_s, SHARDPLAN_JOB_TIMEOUT_S=limit_s, SHARDPLAN_JOB_GRACE_S="120")
        job = ended(server, LONG)
        assert job["status"] == "succeeded" or job["error"]["type"] == "urn:shardplan:solver-error", job["error"]
        if job["plan"] is not None and job["plan"]["solver"]["status"] == "time-limit":
            break
    plan = ShardingPlan.from_dict(job["plan"])
    assert plan.estimate is not None
    assert plan.solver is not None
    assert plan.solver.status == "time-limit"
    assert plan.solver.gap is not None
    assert plan.solver.bound_s is not None
    assert plan.solver.objective_s is not None
    assert 0.0 < plan.solver.gap < 1.0
    assert plan.solver.gap == pytest.approx(1.0 - plan.solver.bound_s / plan.solver.objective_s)
    assert plan.estimate.peak_memory_bytes <= 80e9
    assert 'shardplan_solver_status_total{status="time-limit"} 1.0' in httpx2.get(f"{server.url}/metrics").text


@pytest.mark.slow
def test_search_whose_time_is_up_before_any_plan_fails_and_says_so(
    run_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = run_server(tmp_path / "data", SHARDPLAN_JOB_TIMEOUT_S="0.5", SHARDPLAN_JOB_GRACE_S="120")
    job = ended(server, LONG)
    assert (job["status"], job["plan"]) == ("failed", None)
    assert (job["error"]["type"], job["error"]["status"]) == ("urn:shardplan:solver-error", 500)
    assert "time was up before any plan was found" in job["error"]["detail"]
    assert "longer search" in job["error"]["what_to_do"]
    again = httpx2.post(f"{server.url}/v1/plans", json=LONG, timeout=30)
    assert (again.status_code, again.json()["id"]) == (202, job["id"]), "it may be tried again"


def test_process_over_its_time_is_ended_and_the_job_says_so(run_server: Callable[..., Server], tmp_path: Path) -> None:
    server = run_server(tmp_path / "data", SHARDPLAN_JOB_TIMEOUT_S="0.1", SHARDPLAN_JOB_GRACE_S="0")
    job = ended(server, LONG)
    assert (job["status"], job["plan"]) == ("failed", None)
    assert (job["error"]["type"], job["error"]["status"]) == ("urn:shardplan:timeout", 500)
    assert "ended after 0.1 s" in job["error"]["detail"]
    assert "less to search" in job["error"]["what_to_do"]
