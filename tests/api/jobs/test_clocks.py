"""The database's clock may be set while jobs run: none is lost, none has two results, and dead workers are noticed."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from api.jobs.database import Database
from api.jobs.events import read_news
from api.jobs.housekeeping import Leases, forget
from api.jobs.store import JobRecord, JobStore

HOUR_S = 3600.0
LEASE_S = 15.0


class Clocks:
    """The database's clock and this process's, which tests set and let run."""

    def __init__(self) -> None:
        self.set_by_s = 0.0
        self.passed_s = 0.0

    def wait(self, seconds: float) -> None:
        self.set_by_s += seconds
        self.passed_s += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found, now, monotonic = Clocks(), Database.now, time.monotonic
    monkeypatch.setattr(Database, "now", lambda database: now(database) + found.set_by_s)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + found.passed_s)
    return found


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


@pytest.fixture
def leases(database: Database, store: JobStore, clocks: Clocks) -> Leases:
    """The leases as a process sees them that has looked at them once."""
    seen = Leases(database, store, LEASE_S)
    assert seen.check() == 0
    return seen


def claimed(store: JobStore) -> JobRecord:
    job = store.claim(lease_s=LEASE_S)
    assert job is not None
    return job


def status(store: JobStore, job: JobRecord) -> str:
    found = store.get(job.id)
    assert found is not None
    return found.status


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S])
def test_clock_that_is_set_takes_no_job_from_a_worker_that_lives(
    store: JobStore, leases: Leases, clocks: Clocks, seconds: float
) -> None:
    store.add("f", {})
    job = claimed(store)
    for _ in range(3):
        clocks.set_by_s += seconds
        assert leases.check() == 0
        clocks.wait(LEASE_S / 3)
        assert store.renew(job, LEASE_S), "it is still the worker's"
        assert leases.check() == 0
        seconds = -seconds
    assert store.succeed(job, {"mesh": 1})
    assert not store.succeed(job, {"mesh": 2})


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S])
def test_job_of_a_dead_worker_runs_again_within_a_lease_of_the_clock_being_set(
    store: JobStore, leases: Leases, clocks: Clocks, seconds: float
) -> None:
    store.add("f", {})
    job = claimed(store)
    clocks.set_by_s += seconds
    assert leases.check() == 0
    clocks.wait(LEASE_S + 1.0)
    assert leases.check() == 1
    assert status(store, job) == "queued"
    again = claimed(store)
    assert (again.id, again.attempt) == (job.id, 2)
    assert not store.succeed(job, {"from": "the dead"})
    assert store.succeed(again, {"from": "the second"})


def test_leases_that_could_not_be_renewed_begin_anew(
    store: JobStore, leases: Leases, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add("f", {})
    job = claimed(store)

    def away(database: Database) -> Any:
        raise OperationalError("", {}, Exception())

    with monkeypatch.context() as patch:
        patch.setattr(Database, "read", away)
        with pytest.raises(OperationalError):
            leases.check()
    clocks.wait(60.0)
    assert leases.check() == 0
    assert store.renew(job, LEASE_S)
    clocks.wait(LEASE_S + 1.0)
    assert leases.check() == 1


def test_clock_that_is_set_by_an_hour_forgets_nothing_of_today(
    database: Database, store: JobStore, clocks: Clocks
) -> None:
    job = store.add("f", {})
    store.succeed(claimed(store), {"mesh": 1})
    for seconds in (HOUR_S, -HOUR_S):
        clocks.set_by_s = seconds
        assert forget(database, keep_s=86_400.0, most_kept=10) == 0
    assert status(store, job) == "succeeded"


def test_no_job_is_lost_or_has_two_results_while_the_clock_jumps(database: Database, clocks: Clocks) -> None:
    store = JobStore(database)
    jobs = [store.add(f"f{number}", {}) for number in range(12)]
    done = threading.Event()
    results: list[str] = []

    def work() -> None:
        pause = threading.Event()
        while len(results) < len(jobs) and not done.is_set():
            job = store.claim(lease_s=LEASE_S)
            if job is None:
                pause.wait(0.01)
                continue
            pause.wait(0.02)
            store.renew(job, LEASE_S)
            if store.succeed(job, {"by": threading.get_ident()}):
                results.append(job.id)

    def jump() -> None:
        dice = random.Random(0)
        leases = Leases(database, store, LEASE_S)
        while not done.wait(0.01):
            clocks.set_by_s = dice.choice([0.0, HOUR_S, -HOUR_S])
            leases.check()

    threads = [threading.Thread(target=target) for target in (work, work, work, jump)]
    for thread in threads:
        thread.start()
    for thread in threads[:3]:
        thread.join(timeout=60)
    done.set()
    threads[3].join()
    assert sorted(results) == sorted(job.id for job in jobs), "each has one result"
    assert store.counts() == {"succeeded": len(jobs)}
    for job in jobs:
        news = read_news(database, {job.number: 0})[job.number]
        assert news.ended
        assert [item.data_json for item in news.events].count('{"stage": "succeeded"}') == 1
