"""Results that a time limit cut short are searched again on demand, and only a better one replaces them."""

from __future__ import annotations

from typing import Any

import pytest

from api.jobs.database import Database
from api.jobs.events import read_news
from api.jobs.records.results import is_better, is_cut_short
from api.jobs.store import JobRecord, JobStore, Limits, TooManyJobsError

FAULT = {"title": "no", "status": 500, "detail": ""}


def plan(step_time_s: float, *, gap: float = 0.31, status: str = "time-limit") -> dict[str, Any]:
    return {"estimate": {"step_time_s": step_time_s}, "solver": {"status": status, "gap": gap}}


def row(step_time_s: float | None, *, status: str | None = "optimal", fits: bool | None = True) -> dict[str, Any]:
    return {"step_time_s": step_time_s, "status": status, "fits": fits}


CUT_SHORT, BETTER, WORSE = plan(2.0), plan(1.5), plan(2.5)
PROVED = plan(1.4, gap=0.0, status="optimal")


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


def claimed(store: JobStore) -> JobRecord:
    job = store.claim()
    assert job is not None
    return job


def solved(store: JobStore, result: Any, *, owner: str = "", refresh: bool = False) -> JobRecord:
    """Return the job of an owner's request whose search gave ``result``."""
    job = store.add("f", {"model": "a"}, owner=owner, refresh=refresh)
    assert job.status == "queued"
    assert store.succeed(claimed(store), result)
    return read(store, job)


def read(store: JobStore, job: JobRecord) -> JobRecord:
    found = store.get(job.id)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("result", "cut_short"),
    [
        (CUT_SHORT, True),
        (PROVED, False),
        ({"solver": None, "estimate": None}, False),
        ({"parameter": "lm_head.weight"}, False),
        ([row(1.0), row(2.0, status="time-limit")], True),
        ([row(1.0), row(None, status=None, fits=None)], True),
        ([row(1.0), row(None, status=None, fits=False)], False),
        ([], False),
    ],
)
def test_what_a_time_limit_cut_short(result: Any, cut_short: bool) -> None:
    assert is_cut_short(result) is cut_short


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (BETTER, CUT_SHORT),
        (plan(2.0, status="optimal"), CUT_SHORT),
        (plan(2.0, gap=0.2), CUT_SHORT),
        (CUT_SHORT, plan(2.1, gap=0.0, status="optimal")),
        ([row(3.0)], [row(1.0, status="time-limit"), row(1.0)]),
        ([row(3.0, status="time-limit"), row(2.0)], [row(1.0, status="time-limit"), row(None, fits=None)]),
        ([row(3.0, status="time-limit"), row(2.0)], [row(4.0, status="time-limit"), row(2.0)]),
    ],
)
def test_which_of_two_results_is_better(better: Any, worse: Any) -> None:
    assert is_better(better, worse)
    assert not is_better(worse, better)
    assert not is_better(better, better)


def test_a_result_that_was_cut_short_is_searched_again_when_asked(store: JobStore) -> None:
    job = solved(store, CUT_SHORT)
    assert store.add("f", {"model": "a"}).status == "succeeded"
    again = store.add("f", {"model": "a"}, refresh=True)
    assert (again.id, again.status) == (job.id, "queued")
    assert store.add("f", {"model": "a"}, refresh=True).status == "queued", "it is queued once"
    assert store.counts() == {"queued": 1}
    assert claimed(store).attempt == 2


def test_a_proved_result_is_not_searched_again(store: JobStore) -> None:
    solved(store, PROVED)
    assert store.add("f", {"model": "a"}, refresh=True).status == "succeeded"
    assert store.add("f", {"model": "a"}, owner="other", refresh=True).status == "succeeded"


def test_the_earlier_result_is_read_while_the_job_waits_and_runs(store: JobStore) -> None:
    job = solved(store, CUT_SHORT)
    store.add("f", {"model": "a"}, refresh=True)
    assert (read(store, job).status, read(store, job).plan) == ("queued", CUT_SHORT)
    claimed(store)
    assert (read(store, job).status, read(store, job).plan) == ("running", CUT_SHORT)


def test_a_better_result_replaces_a_worse_one_for_all_owners(store: JobStore) -> None:
    first, other = solved(store, CUT_SHORT), store.add("f", {"model": "a"}, owner="other")
    assert other.plan == CUT_SHORT
    assert solved(store, BETTER, refresh=True).plan == BETTER
    assert read(store, other).plan == BETTER
    assert solved(store, WORSE, owner="other", refresh=True).plan == BETTER
    assert read(store, first).plan == BETTER
    assert solved(store, PROVED, refresh=True).plan == PROVED


def test_one_search_is_enough_for_all_who_ask_again(store: JobStore) -> None:
    first, other = solved(store, CUT_SHORT), store.add("f", {"model": "a"}, owner="other")
    for owner in ("", "other"):
        assert store.add("f", {"model": "a"}, owner=owner, refresh=True).status == "queued"
    running = claimed(store)
    assert store.claim() is None
    assert store.succeed(running, PROVED)
    assert [read(store, job).plan for job in (first, other)] == [PROVED, PROVED]


def test_a_search_that_fails_keeps_the_earlier_result_and_says_why(store: JobStore) -> None:
    job = solved(store, CUT_SHORT)
    store.add("f", {"model": "a"}, refresh=True)
    assert store.fail(claimed(store), FAULT)
    found = read(store, job)
    assert (found.status, found.plan, found.error) == ("succeeded", CUT_SHORT, FAULT)
    assert store.add("f", {"model": "a"}).status == "succeeded", "the error is that of the search, not of the job"
    assert solved(store, BETTER, refresh=True).error is None


def test_a_search_whose_worker_dies_twice_keeps_the_earlier_result(store: JobStore) -> None:
    job = solved(store, CUT_SHORT)
    store.add("f", {"model": "a"}, refresh=True)
    for status in ("queued", "succeeded"):
        assert store.lose(claimed(store))
        assert (read(store, job).status, read(store, job).plan) == (status, CUT_SHORT)


@pytest.mark.parametrize("runs", [False, True])
def test_a_search_that_is_cancelled_keeps_the_earlier_result(store: JobStore, database: Database, runs: bool) -> None:
    job = solved(store, CUT_SHORT)
    store.add("f", {"model": "a"}, refresh=True)
    running = claimed(store) if runs else None
    assert store.cancel(job.id)
    found = read(store, job)
    assert (found.status, found.plan, found.error) == ("succeeded", CUT_SHORT, None)
    news = read_news(database, {job.number: 0})[job.number]
    assert news.ended
    assert '"succeeded"' in news.events[-1].data_json
    assert running is None or not store.succeed(running, BETTER), "it is no longer its job"
    assert not store.cancel(job.id)


def test_asking_again_counts_toward_the_limits(database: Database) -> None:
    store = JobStore(database, limits=Limits(unfinished_per_owner=1))
    job = solved(store, CUT_SHORT)
    store.add("g", {"model": "b"})
    with pytest.raises(TooManyJobsError):
        store.add("f", {"model": "a"}, refresh=True)
    assert read(store, job).plan == CUT_SHORT
