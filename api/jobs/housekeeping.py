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
    """A thread that does each of some duties at its own interval, until it is stopped."""

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
    """Return the housekeeper of a process: retention always, leases and calls where workers are elsewhere."""
    keeper = Housekeeper()
    keeper.add(_RETENTION_S, lambda: forget(database, keep_s=keep_days * _DAY_S, most_kept=most_kept))
    if queue is not None:
        keeper.add(lease_s / 3, store.lose_expired)
        keeper.add(_CALLS_S, lambda: queue.call_again(store.waiting()[:_MOST_AT_ONCE]))
    return keeper


def forget(database: Database, *, keep_s: float, most_kept: int) -> int:
    """Delete what is older than ``keep_s`` or beyond an owner's quota; return how many jobs that were.

    Jobs first, then plans that no job shows any more and that are as old.
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
