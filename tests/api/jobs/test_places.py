"""The place of a waiting job: as many jobs are claimed before it as it says."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from api.jobs.database import Database
from api.jobs.records.places import Place, place_of
from api.jobs.store import JobRecord, JobStore
from api.jobs.tables import JobRow


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


def submitted(store: JobStore, owners: str) -> list[JobRecord]:
    """Submit a job for each letter, which is its owner."""
    return [store.add(f"{number}", {"model": "m"}, owner=owner) for number, owner in enumerate(owners)]


def claimed(store: JobStore) -> JobRecord:
    job = store.claim()
    assert job is not None
    return job


@pytest.mark.parametrize("owners", ["aaaa", "aaaabb", "abcabc", "aaaaaabcc"])
@pytest.mark.parametrize("running", [0, 1, 2])
def test_positions_are_the_order_of_claims(store: JobStore, database: Database, owners: str, running: int) -> None:
    jobs = submitted(store, owners)
    ahead = {claimed(store).id for _ in range(running)}
    positions = {job.id: place_of(database, job).position for job in jobs if job.id not in ahead}
    order = [claimed(store).id for _ in positions]
    assert sorted(positions, key=positions.__getitem__) == order
    assert sorted(positions.values()) == list(range(1, len(order) + 1))


def test_one_who_comes_late_is_next(store: JobStore, database: Database) -> None:
    submitted(store, "aaaaa")
    claimed(store)
    late = store.add("late", {"model": "m"}, owner="b")
    assert place_of(database, late).position == 1


def test_the_wait_follows_from_the_last_durations_and_the_running_jobs(store: JobStore, database: Database) -> None:
    *_, last = submitted(store, "aaaaaa")
    assert place_of(database, last) == Place(position=6, expected_wait_s=None), "nothing runs"
    first = claimed(store)
    assert place_of(database, last) == Place(position=5, expected_wait_s=None), "nothing has ended"
    store.succeed(first, {})
    with database.write() as connection:
        took = update(JobRow).where(JobRow.number == first.number)
        connection.execute(took.values(finished_at=JobRow.started_at + 10.0))
    claimed(store), claimed(store)
    assert place_of(database, last) == Place(position=3, expected_wait_s=15.0)


def test_jobs_that_did_not_run_tell_no_duration(store: JobStore, database: Database) -> None:
    *_, last = submitted(store, "aaa")
    first = claimed(store)
    store.cancel(first.id)
    claimed(store)
    store.add("known", {"model": "m"}, owner="a")
    assert place_of(database, last).expected_wait_s is None
