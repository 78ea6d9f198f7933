"""Periodic duties: requeue the jobs of dead workers, repeat queue calls, delete old jobs and plans, free space."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog
from sqlalchemy import ColumnElement, Connection, Select, and_, delete, func, literal, or_, select, update

from api.jobs.database import UNREACHABLE, Database
from api.jobs.pg_queue import CallQueue
from api.jobs.store import JobStore, delete_jobs
from api.jobs.tables import JobRow, KeyRow, PlanRow

_DAY_S = 86_400.0
_RETENTION_S = 60.0
_CALLS_S = 10.0
_MEMORY_S = 30.0
_M_ARENA_MAX = -8  # of malloc.h
_ARENAS = 2  # glibc's own limit is eight for each core; cached plans are answered as fast with two
_MOST_AT_ONCE = 500
_STOP_S = 2.0
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
        """End the thread; a duty that hangs, since the database does, is left alone after two seconds."""
        self._stopping.set()
        if self.is_alive():
            self.join(_STOP_S)


class Leases:
    """The leases of the workers, by the database's clock, which may be set: then they begin anew, and nobody is lost.

    A clock that is set an hour forward would end all leases; set back, it would let dead workers keep theirs.
    """

    def __init__(self, database: Database, store: JobStore, lease_s: float) -> None:
        self._database = database
        self._store = store
        self._lease_s = lease_s
        self._offset: float | None = None
        self._started = False

    def check(self) -> int:
        """Requeue or fail the jobs whose leases have expired; return their number.

        None is lost at the first check, nor where the database's clock was set since the last one, or did not answer:
        its workers could not renew their leases either.
        """
        offset, self._offset = self._offset, None
        before = time.monotonic()
        with self._database.read() as connection:
            now: float = connection.execute(select(self._database.now())).scalar_one()
        self._offset = now - before
        started, self._started = self._started, True
        if not started:
            return 0
        if offset is not None and abs(self._offset - offset) < self._lease_s / 3:  # a worker renews three times a lease
            return self._store.lose_expired()
        structlog.get_logger().warning("leases begin anew", clock_set_by_s=offset and round(self._offset - offset, 1))
        anew = update(JobRow).where(JobRow.status == "running", JobRow.lease_until.is_not(None))
        with self._database.write() as connection:
            connection.execute(anew.values(lease_until=self._database.now() + self._lease_s))
        return 0


def return_memory() -> None:
    """Give the system back what glibc keeps of freed results: threads read and free a hundred kB for each job."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def share_memory() -> None:
    """Let threads share what glibc keeps of freed memory, where each would keep its own; before they start."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def housekeeper(
    database: Database,
    store: JobStore,
    queue: CallQueue | None,
    *,
    lease_s: float,
    keep_days: float,
    most_kept: int,
    most_bytes: int | None = None,
) -> Housekeeper:
    """Return the housekeeper of a process: it deletes old jobs, and with ``queue`` it also requeues and calls again.

    Args:
        database: the database of the jobs.
        store: the jobs.
        queue: the calls to remote workers (PostgreSQL); None with embedded workers (SQLite).
        lease_s: seconds of a worker's lease; expired leases are looked for three times in a lease.
        keep_days: days after which ended jobs, plans and idempotency keys are deleted.
        most_kept: most ended jobs of one owner.
        most_bytes: most bytes of the requests and results of these jobs; None: any number.
    """
    keeper = Housekeeper()
    keep_s = keep_days * _DAY_S
    keeper.add(_RETENTION_S, lambda: forget(database, keep_s=keep_s, most_kept=most_kept, most_bytes=most_bytes))
    keeper.add(_RETENTION_S, database.shrink)
    keeper.add(_MEMORY_S, return_memory)
    if queue is not None:
        keeper.add(lease_s / 3, Leases(database, store, lease_s).check)
        keeper.add(_CALLS_S, lambda: queue.call_again(store.waiting()[:_MOST_AT_ONCE]))
    return keeper


def forget(database: Database, *, keep_s: float, most_kept: int, most_bytes: int | None = None) -> int:
    """Delete old jobs, plans and idempotency keys; return the number of deleted jobs, at most 500.

    A job is old if it ended more than ``keep_s`` seconds ago, or if ``most_kept`` jobs of its owner ended later, or if
    it has, with those that did, more than ``most_bytes`` bytes of requests and results. A plan of no job is old if it
    was made more than ``keep_s`` seconds ago, or is over ``most_bytes`` with later ones. A key is old if it was used
    more than ``keep_s`` seconds ago.
    """
    limit = most_bytes if most_bytes is not None and database.may_hold(most_bytes) else None
    since = database.now() - keep_s
    with database.read() as connection:
        job_numbers = connection.scalars(_old_jobs(database, since, most_kept, limit)).all()
    with database.write() as connection:
        # Lock jobs and plans before deleting them: a concurrent request may ask for one of them.
        locked_jobs = (
            select(JobRow.number).where(JobRow.number.in_(job_numbers), JobRow.status.in_(_ENDED)).with_for_update()
        )
        numbers = connection.scalars(locked_jobs).all()
        delete_jobs(connection, numbers)
        _delete_old_plans(database, connection, since, limit)
        connection.execute(delete(KeyRow).where(KeyRow.used_at < since))
    return len(numbers)


def _old_jobs(database: Database, since: ColumnElement[float], most_kept: int, most_bytes: int | None) -> Select[Any]:
    latest_first: dict[str, Any] = {
        "partition_by": JobRow.owner,
        "order_by": (JobRow.finished_at.desc(), JobRow.number.desc()),
    }
    columns = [JobRow.number, JobRow.finished_at, func.row_number().over(**latest_first).label("place")]
    same = and_(PlanRow.fingerprint == JobRow.fingerprint, JobRow.status == "succeeded")
    if most_bytes is None:
        ended = select(*columns, literal(0).label("nbytes"))
    else:
        nbytes = database.size_of(JobRow.request) + func.coalesce(database.size_of(PlanRow.plan), 0)
        ended = select(*columns, func.sum(nbytes).over(**latest_first).label("nbytes")).outerjoin(PlanRow, same)
    found = ended.where(JobRow.status.in_(_ENDED)).subquery()
    too_many = or_(found.c.place > most_kept, and_(found.c.place > 1, found.c.nbytes > (most_bytes or 0)))
    return select(found.c.number).where(or_(found.c.finished_at < since, too_many)).limit(_MOST_AT_ONCE)


def _delete_old_plans(
    database: Database, connection: Connection, since: ColumnElement[float], most_bytes: int | None
) -> None:
    unused = PlanRow.fingerprint.not_in(select(JobRow.fingerprint))
    old = PlanRow.made_at < since
    if most_bytes is not None:
        nbytes = func.sum(database.size_of(PlanRow.plan)).over(order_by=PlanRow.made_at.desc()).label("nbytes")
        sizes = select(PlanRow.fingerprint, nbytes).where(unused).subquery()
        old = or_(old, PlanRow.fingerprint.in_(select(sizes.c.fingerprint).where(sizes.c.nbytes > most_bytes)))
    first = select(PlanRow.fingerprint).where(unused, old).limit(_MOST_AT_ONCE)
    fingerprints = connection.scalars(first.with_for_update()).all()
    connection.execute(delete(PlanRow).where(PlanRow.fingerprint.in_(fingerprints), unused))
