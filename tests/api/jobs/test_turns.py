"""Owners take turns: however many jobs one of them submits, the first job of another is soon claimed."""

from __future__ import annotations

from collections import Counter

import pytest

from api.jobs.database import Database
from api.jobs.store import JobRecord, JobStore, Limits


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database, limits=Limits(queued=10_000, unfinished_per_owner=1000))


def submitted(store: JobStore, counts: dict[str, int]) -> None:
    """Submit so many jobs of each owner, those of the first owner first."""
    for owner, count in counts.items():
        for number in range(count):
            store.add(f"{owner} {number}", {"model": owner}, owner=owner)


def claimed(store: JobStore) -> list[JobRecord]:
    found = []
    while (job := store.claim()) is not None:
        found.append(job)
        store.fail(job, {"status": 500})
    return found


def test_ten_owners_with_1_to_50_jobs_take_turns(store: JobStore) -> None:
    counts = {f"owner {number}": count for number, count in enumerate((50, 20, 10, 5, 5, 3, 2, 1, 1, 1))}
    submitted(store, counts)
    owners = [job.owner for job in claimed(store)]
    assert Counter(owners) == counts
    assert set(owners[:10]) == set(counts), "the first job of each waits for one job of each other"
    for turn in range(1, 5):
        left = {owner for owner, count in counts.items() if count > turn}
        start = sum(min(count, turn) for count in counts.values())
        assert set(owners[start : start + len(left)]) == left


def test_an_owner_who_comes_late_is_next(store: JobStore) -> None:
    submitted(store, {"first": 30})
    for _ in range(5):
        job = store.claim()
        assert job is not None
        store.fail(job, {"status": 500})
    submitted(store, {"second": 2})
    owners = [job.owner for job in claimed(store)]
    assert owners[:4] == ["second", "first", "second", "first"]


def test_jobs_of_one_owner_run_in_their_order(store: JobStore) -> None:
    submitted(store, {"first": 5})
    found = claimed(store)
    assert [job.id for job in found] == [job.id for job in sorted(found, key=lambda job: job.number)]


def test_a_spare_worker_claims_for_owners_who_have_none_running(store: JobStore) -> None:
    submitted(store, {"first": 3})
    assert store.claim() is not None
    assert store.claim(spare=True) is None
    submitted(store, {"second": 2})
    job = store.claim(spare=True)
    assert job is not None
    assert job.owner == "second"
    assert store.claim(spare=True) is None
    store.fail(job, {"status": 500})
    again = store.claim(spare=True)
    assert again is not None
    assert again.owner == "second"


def test_an_owner_whose_job_has_started_in_the_future_is_not_the_last_for_an_hour(
    store: JobStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a clock that was set back by an hour."""
    submitted(store, {"first": 3})
    now = database.now
    monkeypatch.setattr(database, "now", lambda: now() + 3600)
    assert store.claim() is not None
    monkeypatch.undo()
    submitted(store, {"second": 3})
    owners = [job.owner for job in (store.claim(), store.claim(), store.claim()) if job]
    assert owners == ["first", "second", "first"]
