"""Comparisons within the time limit of a job."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.small_models import TINY_REQUEST

from api.jobs.comparisons import comparison_rows, seconds_each
from api.requests import shared_time
from api.requests.comparisons import ComparisonRequest
from api.requests.plan_request import opened_request
from api.requests.schemas import PlanRequest
from planner.errors import SolverError
from planner.progress import ProgressEvent, RunSolving
from planner.session import PlanningSession
from planner.tradeoffs import alternatives, pareto_front

ANY_MESH = {name: value for name, value in TINY_REQUEST.items() if name != "mesh"}
DECODE = {**{name: ANY_MESH[name] for name in ("model", "cluster", "seq", "dtype")}, "mesh": "dp=4"}


class Clock:
    """A clock that a test moves on."""

    now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shared_time, "time", clock)
    return clock


def rows_of(time_limit_s: float, **body: Any) -> list[dict[str, Any]]:
    comparison = ComparisonRequest.model_validate(body).root
    return comparison_rows(comparison, progress=lambda event: None, time_limit_s=time_limit_s)


def session(clock: Clock, *, step_s: float = 0.0) -> PlanningSession:
    """A session whose searches have 60 s together; each integer program moves the clock on."""

    def move_on(event: ProgressEvent) -> None:
        clock.now_s += step_s if isinstance(event, RunSolving) else 0.0

    opened = opened_request(PlanRequest(**TINY_REQUEST), allow_local=False, progress=move_on)
    return dataclasses.replace(opened, shares_time=True).session(time_limit_s=60.0)


def test_searches_of_a_session_share_its_time(clock: Clock) -> None:
    planning = session(clock, step_s=25.0)
    planning.plan(mesh="dp=2,tp=2")
    assert planning.spec.time_limit_s == 60.0
    assert planning.plan_if_any(mesh="dp=4") is not None
    assert planning.spec.time_limit_s == 35.0
    assert planning.least_memory_bytes(mesh="dp=4") is not None
    clock.now_s += 25.0
    assert planning.least_memory_bytes(mesh="dp=4") is None
    for search in (planning.plan, planning.plan_if_any):
        with pytest.raises(SolverError, match="time was up"):
            search(mesh="dp=4")


def test_a_front_ends_with_the_time(clock: Clock) -> None:
    assert len(pareto_front(session(clock), mesh="dp=2,tp=2")) > 1
    assert len(pareto_front(session(clock, step_s=61.0), mesh="dp=2,tp=2")) == 1


def test_alternatives_end_with_the_time(clock: Clock) -> None:
    planning = session(clock, step_s=61.0)
    best = planning.plan()
    assert alternatives(planning, best, 3) == ()


def test_searches_of_a_sweep_and_what_follows_them_end_within_the_limit() -> None:
    assert seconds_each(3600.0, 10) == 350.0
    assert seconds_each(30.0, 3) == 5.0


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "sweep", "request": ANY_MESH, "devices": [1, 2]},
        {"kind": "batches", "request": DECODE, "most": 2},
    ],
    ids=["sweep", "batches"],
)
def test_rows_that_were_not_found_in_time_say_so(body: dict[str, Any]) -> None:
    rows = rows_of(1e-6, **body)
    assert rows
    assert {(row["fits"], row["plan"], row["best"]) for row in rows} == {(None, None, False)}
