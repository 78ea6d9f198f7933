"""Periodic duties: requeue the jobs of dead workers, repeat queue calls, delete old jobs and plans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog
from sqlalchemy import and_, delete, func, select

from api.jobs.database import UNREACHABLE, Database
from api.jobs.pg_queue import CallQueue
from api.jobs.store import JobStore, delete_jobs
from api.jobs.tables import JobRow, KeyRow, PlanRow

_DAY_S = 86_400.0
_RETENTION_S = 60.0
_CALLS_S = 10.0
_MOST_AT_ONCE = 500
_ENDED = ("succeeded", "failed", "cancelled")


class Housekeeper(threading.Thread):
    """A thread that runs each of its duties at the duty's interval, until `stop` is called."""

    def __init__(self) -> None:
        super().__init__(name="shardplan-housekeeper", daemon=True)
        self._duties: list[tuple[float, Callable[[], object]]] = []
        self._stopping = threading.Event()

    def add(self, interval_s: float, duty: Callable[[], object]) -> None:
        """Run ``duty`` every ``interval_s`` seconds. Call it before `start`."""
        self._duties.append((interval_s, duty))

    def run(self) -> None:
        due = [time.monotonic() + interval_s for interval_s, _ in self._duties]
        while not self._stopping.wait(max(0.0, min(due) - time.monotonic())):
            for number, (interval_s, duty) in enumerate(self._duties):
                if time.monotonic() < due[number]:
                    continue
                try:
                    duty()
                except UNREACHABLE as error:
                    structlog.get_logger().warning("housekeeping put off", error=type(error).__name__)
                due[number] = time.monotonic() + interval_s

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self.is_alive():
            self.join()


def housekeeper(
    database: Database, store: JobStore, queue: CallQueue | None, *, lease_s: float, keep_days: float, most_kept: int
) -> Housekeeper:
    """Return the housekeeper of a process: it deletes old jobs, and with ``queue`` it also requeues and calls again.

    Args:
        database: the database of the jobs.
        store: the jobs.
        queue: the calls to remote workers (PostgreSQL); None with embedded workers (SQLite).
        lease_s: seconds of a worker's lease; expired leases are looked for three times in a lease.
        keep_days: days after which ended jobs, plans and idempotency keys are deleted.
        most_kept: most ended jobs of one owner.
    """
    keeper = Housekeeper()
    keeper.add(_RETENTION_S, lambda: forget(database, keep_s=keep_days * _DAY_S, most_kept=most_kept))
    if queue is not None:
        keeper.add(lease_s / 3, store.lose_expired)
        keeper.add(_CALLS_S, lambda: queue.call_again(store.waiting()[:_MOST_AT_ONCE]))
    return keeper


def forget(database: Database, *, keep_s: float, most_kept: int) -> int:
    """Delete old jobs, plans and idempotency keys; return the number of deleted jobs, at most 500.

    A job is old if it ended more than ``keep_s`` seconds ago, or if ``most_kept`` jobs of its owner ended later. A plan
    is old if it was made more than ``keep_s`` seconds ago and no job has its fingerprint. A key is old if it was used
    more than ``keep_s`` seconds ago.
    """
    with database.write() as connection:
        since = database.now() - keep_s
        place = func.row_number().over(partition_by=JobRow.owner, order_by=JobRow.finished_at.desc()).label("place")
        ended = select(JobRow.number, JobRow.finished_at, place).where(JobRow.status.in_(_ENDED)).subquery()
        old = select(ended.c.number).where((ended.c.finished_at < since) | (ended.c.place > most_kept))
        # Lock jobs and plans before deleting them: a concurrent request may ask for one of them.
        job_numbers = connection.scalars(old.limit(_MOST_AT_ONCE)).all()
        locked_jobs = (
            select(JobRow.number).where(JobRow.number.in_(job_numbers), JobRow.status.in_(_ENDED)).with_for_update()
        )
        numbers = connection.scalars(locked_jobs).all()
        delete_jobs(connection, numbers)
        shown = select(JobRow.fingerprint)
        unused_plan = and_(PlanRow.made_at < since, PlanRow.fingerprint.not_in(shown))
        first = select(PlanRow.fingerprint).where(unused_plan).limit(_MOST_AT_ONCE)
        fingerprints = connection.scalars(first.with_for_update()).all()
        connection.execute(
            delete(PlanRow).where(PlanRow.fingerprint.in_(fingerprints), PlanRow.fingerprint.not_in(shown))
        )
        connection.execute(delete(KeyRow).where(KeyRow.used_at < since))
    return len(numbers)
