"""What ended jobs may take: bytes as well as a number of them, and the disk gets back what they took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import func, select

from api.jobs import housekeeping
from api.jobs.database import Database
from api.jobs.housekeeping import forget
from api.jobs.settings import ServerSettings
from api.jobs.startup import open_database
from api.jobs.store import JobRecord, JobStore
from api.jobs.tables import PlanRow

MONTH_S = 30 * 86_400.0
KB = "x" * 1000


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


def cancelled(store: JobStore, fingerprint: str, kilobytes: int = 100, owner: str = "") -> JobRecord:
    job = store.add(fingerprint, {"model": KB * kilobytes}, owner=owner)
    store.cancel(job.id)
    return job


def planned(store: JobStore, fingerprint: str, kilobytes: int = 100) -> JobRecord:
    job = store.add(fingerprint, {})
    claimed = store.claim()
    assert claimed is not None
    assert store.succeed(claimed, {"plan": KB * kilobytes})
    return job


def kept(store: JobStore, jobs: list[JobRecord]) -> list[bool]:
    return [store.get(job.id) is not None for job in jobs]


def plans(database: Database) -> int:
    with database.read() as connection:
        return connection.scalar(select(func.count()).select_from(PlanRow)) or 0


def test_the_oldest_jobs_go_where_all_have_too_many_bytes(database: Database, store: JobStore) -> None:
    jobs = [cancelled(store, f"f{number}") for number in range(6)]
    other = cancelled(store, "f0", owner="other")
    waiting = store.add("w", {"model": KB * 1000})
    assert forget(database, keep_s=MONTH_S, most_kept=1000) == 0
    assert forget(database, keep_s=MONTH_S, most_kept=1000, most_bytes=350_000) == 3
    assert kept(store, [*jobs, other, waiting]) == [False, False, False, True, True, True, True, True]
    assert forget(database, keep_s=MONTH_S, most_kept=1000, most_bytes=350_000) == 0


def test_results_count_and_those_of_no_job_go_as_well(database: Database, store: JobStore) -> None:
    jobs = [planned(store, f"f{number}") for number in range(6)]
    assert forget(database, keep_s=MONTH_S, most_kept=1000, most_bytes=250_000) == 4
    assert kept(store, jobs) == [False, False, False, False, True, True]
    forget(database, keep_s=MONTH_S, most_kept=1000, most_bytes=150_000)
    assert kept(store, jobs) == [False] * 5 + [True]
    assert plans(database) == 2, "one of a job, and one of none"


def test_the_latest_job_stays_however_large_it_is(database: Database, store: JobStore) -> None:
    jobs = [cancelled(store, f"f{number}", kilobytes=500) for number in range(2)]
    assert forget(database, keep_s=MONTH_S, most_kept=1000, most_bytes=100_000) == 1
    assert kept(store, jobs) == [False, True]


def test_a_job_that_is_tried_again_meanwhile_stays(database: Database, store: JobStore) -> None:
    first, second = cancelled(store, "first"), cancelled(store, "second")
    again = store.add("first", {"model": KB * 100})
    assert (again.id, again.status) == (first.id, "queued")
    forget(database, keep_s=MONTH_S, most_kept=1000, most_bytes=1000)
    assert kept(store, [first, second]) == [True, True]


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Database]:
    with closing(open_database(ServerSettings(data_dir=tmp_path))) as opened:
        yield opened


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def fill(database: Database, jobs: int = 60) -> None:
    store = JobStore(database)
    for number in range(jobs):
        cancelled(store, f"f{number}", kilobytes=950)


def test_the_disk_gets_back_what_jobs_took(sqlite: Database, tmp_path: Path) -> None:
    fill(sqlite)
    assert size(tmp_path) > 57_000_000
    assert sqlite.may_hold(57_000_000)
    assert not sqlite.may_hold(70_000_000)
    assert forget(sqlite, keep_s=MONTH_S, most_kept=1000, most_bytes=5_000_000) == 55
    sqlite.shrink()
    assert size(tmp_path) < 7_000_000
    assert JobStore(sqlite).counts() == {"cancelled": 5}


def test_a_database_of_an_earlier_version_shrinks_too(tmp_path: Path) -> None:
    file = tmp_path / "jobs.sqlite3"
    with closing(Database(f"sqlite:///{file}")) as earlier:
        with earlier.read() as connection:
            connection.exec_driver_sql("PRAGMA auto_vacuum = NONE")
            connection.exec_driver_sql("VACUUM")
        earlier.migrate()
        with earlier.read() as connection:
            assert connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() == 0
        fill(earlier, jobs=10)
    with closing(open_database(ServerSettings(data_dir=tmp_path))) as opened:
        with opened.read() as connection:
            assert connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() == 2
        assert JobStore(opened).counts() == {"cancelled": 10}
        forget(opened, keep_s=MONTH_S, most_kept=2)
        opened.shrink()
        assert size(tmp_path) < 4_000_000


def test_the_housekeeper_of_a_server_does_both(
    sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "_RETENTION_S", 0.01)
    fill(sqlite)
    keeper = housekeeping.housekeeper(
        sqlite, JobStore(sqlite), None, lease_s=15.0, keep_days=30, most_kept=1000, most_bytes=5_000_000
    )
    keeper.start()
    try:
        pause = keeper._stopping
        for _ in range(200):
            if size(tmp_path) < 7_000_000:
                break
            pause.wait(0.05)
        assert size(tmp_path) < 7_000_000
    finally:
        keeper.stop()
