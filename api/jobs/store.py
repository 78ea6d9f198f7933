"""The jobs: one row per owner and request, in one table that is both the queue and the record.

queued --claim--> running --succeed, fail--> succeeded, failed
queued, running --cancel--> cancelled
running --release--> queued (its worker stops); --lose--> queued (its worker died), the second time failed
succeeded --add with refresh--> queued, where a time limit cut the result short; the result is kept, so that the job
succeeds with it where the new search fails or is cancelled

A claim increments the attempt's number and leases the job to a worker. A worker's result counts only while the job runs
in that attempt. So a worker that wrongly counts as dead can neither end a job twice nor change how it ended.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    case,
    delete,
    exists,
    false,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import aliased

from api.jobs.database import Database
from api.jobs.records.job import UNFINISHED, JobRecord, job_rows, one_job, record_of, still_running
from api.jobs.records.results import is_better, is_cut_short
from api.jobs.tables import EventRow, JobRow, PlanRow
from api.requests.schemas import JOB_KINDS, JobKind, JobStatus
from planner.errors import PlannerError

__all__ = ["JobRecord", "JobStore", "Limits", "TooManyJobsError"]

Queued = Callable[[Connection, str], None]
"""Called with each job that is queued, within the transaction that queues it."""

MOST_DEATHS = 2
"""Deaths of workers after which a job fails: a job that kills two workers would kill a third."""

WORKER_DIED = {
    "type": "urn:shardplan:worker-died",
    "title": "The worker process died",
    "status": 500,
    "detail": "The process that planned this ended without an answer, twice.",
    "what_to_do": "Ask again to try again; the server's log may say more.",
}


_LIMITS_LOCK = 7_301_866_052_714_004


class TooManyJobsError(PlannerError):
    """The queue is full, or an owner has as many unfinished jobs as one may have."""

    http_status = 429
    title = "Too many jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most jobs that may wait in all, and that may wait or run for one owner."""

    queued: int = 1000
    unfinished_per_owner: int = 1000


class JobStore:
    """The jobs in a database. Each change of a job is one transaction. Methods may be called from any thread."""

    def __init__(self, database: Database, *, queued: Queued | None = None, limits: Limits | None = None) -> None:
        self._database = database
        self._queued = queued
        self._limits = limits or Limits()

    def add(
        self, fingerprint: str, request: dict[str, Any], *, owner: str = "", label: str = "", refresh: bool = False
    ) -> JobRecord:
        """Return the owner's job of this fingerprint, which is queued if it is new or may be tried again.

        A job that would be queued succeeds at once if an equal request of any owner has a result. With ``refresh`` it
        is queued all the same where that result was cut short, and so is a job that has succeeded with it. The job's
        kind is the ``kind`` in its request, "plan" where it has none. ``label`` is the job's text in lists.

        Raises:
            TooManyJobsError: the job would be queued, and a limit on the number of jobs is reached.
        """
        with self._database.write() as connection:
            own_job = and_(JobRow.owner == owner, JobRow.fingerprint == fingerprint)
            earlier_job = one_job(connection, job_rows().where(own_job))
            if earlier_job is not None and not earlier_job.runs_again(refresh=refresh):
                return earlier_job
            # Lock the plan's row, so that housekeeping cannot delete it before the new job refers to it.
            plan_query = select(PlanRow.plan).where(PlanRow.fingerprint == fingerprint).with_for_update(read=True)
            plan_json = connection.scalar(plan_query)
            planned = plan_json is not None and not (refresh and is_cut_short(json.loads(plan_json)))
            if not planned:
                self._check_limits(connection, owner)
            now = self._database.now()
            outcome = {"status": "succeeded", "finished_at": now} if planned else {"status": "queued"}
            fresh = {**outcome, "deaths": 0, "queued_at": now}
            if earlier_job is None:
                row = {"id": uuid.uuid4().hex, "owner": owner, "fingerprint": fingerprint, "attempt": 0, **fresh}
                row |= {"request": json.dumps(request), "kind": request.get("kind", "plan"), "label": label[:400]}
                insertion = self._database.insert_new(JobRow, **row).returning(JobRow.number)
                changed = connection.scalar(insertion) is not None
            else:
                requeue = update(JobRow).where(JobRow.number == earlier_job.number, JobRow.status == earlier_job.status)
                cleared_columns = {"error": None, "started_at": None, "finished_at": None, "lease_until": None}
                changed = connection.execute(requeue.values({**cleared_columns, **fresh})).rowcount > 0
            job = one_job(connection, job_rows().where(own_job))
            assert job is not None, "it was inserted just now"
            if changed:  # else a concurrent equal request changed and announced it
                self._announce(connection, job.number, job.id, job.status)
            return job

    def get(self, job_id: str, *, owner: str | None = None, is_brief: bool = False) -> JobRecord | None:
        """Return the job of this id; None where there is none, or it is another owner's. ``owner`` None: any owner.

        ``is_brief``: without its request and result.
        """
        own_job = JobRow.id == job_id if owner is None else and_(JobRow.id == job_id, JobRow.owner == owner)
        with self._database.read() as connection:
            rows = job_rows(with_result=not is_brief, with_request=not is_brief)
            return one_job(connection, rows.where(own_job))

    def find(self, fingerprint: str, *, owner: str = "") -> JobRecord | None:
        """Return the owner's job of this fingerprint, or None."""
        with self._database.read() as connection:
            return one_job(connection, job_rows().where(JobRow.owner == owner, JobRow.fingerprint == fingerprint))

    def page(
        self,
        *,
        owner: str | None,
        kinds: Collection[JobKind] = JOB_KINDS,
        status: JobStatus | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> Sequence[JobRecord]:
        """Return up to ``limit`` jobs of some kinds, the newest first, without requests and results.

        ``owner``, ``status`` and ``before`` select jobs of an owner, with a status, with a smaller number; None: all.
        """
        statement = job_rows(with_result=False, with_request=False).where(JobRow.kind.in_(kinds))
        statement = statement.order_by(JobRow.number.desc()).limit(limit)
        if owner is not None:
            statement = statement.where(JobRow.owner == owner)
        if status is not None:
            statement = statement.where(JobRow.status == status)
        if before is not None:
            statement = statement.where(JobRow.number < before)
        with self._database.read() as connection:
            return [record_of(row) for row in connection.execute(statement)]

    def claim(self, *, worker: str = "", lease_s: float = 60.0, spare: bool = False) -> JobRecord | None:
        """Mark the next job as running and return it, to one caller only; None where none can run.

        Owners take turns, by when their last job started. A job cannot run while one with the same fingerprint runs.
        With ``spare`` only jobs of owners who have none running are claimed.
        """
        for _ in range(3):
            try:
                with self._database.write() as connection:
                    return self._claim(connection, worker, lease_s, spare=spare)
            except IntegrityError:
                continue  # another worker claimed an equal request concurrently
        return None

    def renew(self, job: JobRecord, lease_s: float, events: Iterable[dict[str, Any]] = ()) -> bool:
        """Renew the lease of a claimed job and record events; return False where the job is no longer the caller's."""
        with self._database.write() as connection:
            statement = update(JobRow).where(still_running(job)).values(lease_until=self._database.now() + lease_s)
            if connection.execute(statement).rowcount == 0:
                return False
            for event in events:
                connection.execute(insert(EventRow).values(job_number=job.number, data=json.dumps(event)))
            return True

    def is_claimed(self, job: JobRecord) -> bool:
        """Return whether a claimed job still runs in its attempt: not cancelled, and taken by nobody else."""
        with self._database.read() as connection:
            return bool(connection.scalar(select(exists().where(still_running(job)))))

    def succeed(self, job: JobRecord, result: Any) -> bool:
        """End a claimed job, and waiting equal ones, with a result; return False where the job is not the caller's.

        An earlier result of the same request is replaced, for all owners, if the new one is better.
        """
        with self._database.write() as connection:
            if not self._end(connection, job, "succeeded", None):
                return False
            values = {"plan": json.dumps(result), "made_at": self._database.now()}
            connection.execute(self._database.insert_new(PlanRow, fingerprint=job.fingerprint, **values))
            own_result = PlanRow.fingerprint == job.fingerprint
            stored = connection.scalar(select(PlanRow.plan).where(own_result).with_for_update())
            if stored is not None and is_better(result, json.loads(stored)):
                connection.execute(update(PlanRow).where(own_result).values(**values))
            return True

    def fail(self, job: JobRecord, error: dict[str, Any]) -> bool:
        """End a claimed job with the problem details ``error``; return False where the job is not the caller's."""
        with self._database.write() as connection:
            return self._end(connection, job, "failed", error)

    def release(self, job: JobRecord) -> bool:
        """Requeue a claimed job at its old place, since its worker stops; return False where it is not the caller's."""
        with self._database.write() as connection:
            return self._queue_again(connection, job, deaths=literal(0))

    def lose(self, job: JobRecord) -> bool:
        """Requeue a claimed job whose worker died, or fail it at the second death; False if it is not the caller's."""
        return self._lose(job, still_running(job))

    def lose_expired(self) -> int:
        """Requeue or fail, as `lose` does, the jobs whose leases have expired; return their number."""
        over = JobRow.lease_until < self._database.now()
        with self._database.read() as connection:
            rows = connection.execute(job_rows(with_result=False).where(JobRow.status == "running", over))
            expired = [record_of(row) for row in rows]
        return sum(self._lose(job, and_(still_running(job), over)) for job in expired)

    def release_interrupted(self) -> int:
        """Requeue the jobs that an earlier server left running (SQLite has one server only); return their number."""
        with self._database.read() as connection:
            running = connection.execute(job_rows(with_result=False).where(JobRow.status == "running"))
            interrupted = [record_of(row) for row in running]
        return sum(self.release(job) for job in interrupted)

    def cancel(self, job_id: str) -> bool:
        """Cancel a job that waits or runs; return False where it does neither.

        A job that was searched again has then succeeded with its earlier result.
        """
        with self._database.write() as connection:
            unfinished_job = and_(JobRow.id == job_id, JobRow.status.in_(UNFINISHED))
            ending = {"status": _or_succeeded("cancelled"), "finished_at": self._database.now()}
            statement = update(JobRow).where(unfinished_job).values(**ending)
            ended = connection.execute(statement.returning(JobRow.number, JobRow.status)).one_or_none()
            if ended is not None:
                self._announce(connection, ended.number, job_id, ended.status)
            return ended is not None

    def waiting(self) -> Sequence[str]:
        """Return the ids of the waiting jobs, the one that has waited longest first."""
        with self._database.read() as connection:
            statement = select(JobRow.id).where(JobRow.status == "queued").order_by(JobRow.queued_at, JobRow.number)
            return connection.scalars(statement).all()

    def counts(self) -> dict[str, int]:
        """Return status -> number of jobs."""
        with self._database.read() as connection:
            rows = connection.execute(select(JobRow.status, func.count().label("jobs")).group_by(JobRow.status))
            return {row.status: row.jobs for row in rows}

    def _check_limits(self, connection: Connection, owner: str) -> None:
        if self._database.is_postgresql:  # else others' jobs that are not committed yet would not count
            connection.execute(select(func.pg_advisory_xact_lock(_LIMITS_LOCK)))
        waits = select(func.count()).select_from(JobRow).where(JobRow.status == "queued")
        if (connection.scalar(waits) or 0) >= self._limits.queued:
            raise TooManyJobsError("Too many jobs are waiting.", what_to_do="Try again later.")
        own_count = select(func.count()).select_from(JobRow)
        own_count = own_count.where(JobRow.owner == owner, JobRow.status.in_(UNFINISHED))
        most = self._limits.unfinished_per_owner
        if (connection.scalar(own_count) or 0) >= most:
            raise TooManyJobsError(f"{most} jobs of yours wait or run.", what_to_do="Wait for one of them to end.")

    def _claim(self, connection: Connection, worker: str, lease_s: float, *, spare: bool) -> JobRecord | None:
        running = aliased(JobRow)
        blocking = or_(running.fingerprint == JobRow.fingerprint, running.owner == JobRow.owner if spare else false())
        first = select(JobRow.number).where(
            JobRow.status == "queued", ~exists().where(running.status == "running", blocking)
        )
        owned = aliased(JobRow)
        now = self._database.now()
        started = case((owned.started_at <= now, owned.started_at))  # later than now: before the clock was set back
        turn = func.coalesce(select(func.max(started)).where(owned.owner == JobRow.owner).scalar_subquery(), 0)
        first = first.order_by(turn, JobRow.queued_at, JobRow.number).limit(1).with_for_update(skip_locked=True)
        claimed = update(JobRow).where(JobRow.number == first.scalar_subquery(), JobRow.status == "queued")
        claimed = claimed.values(
            status="running", attempt=JobRow.attempt + 1, worker=worker, started_at=now, lease_until=now + lease_s
        )
        number = connection.scalar(claimed.returning(JobRow.number))
        if number is None:
            return None
        job = one_job(connection, job_rows(with_result=False).where(JobRow.number == number))
        assert job is not None, "it was claimed just now"
        self._announce(connection, job.number, job.id, "running")
        return job

    def _lose(self, job: JobRecord, lost: ColumnElement[bool]) -> bool:
        with self._database.write() as connection:
            died = connection.scalar(select(JobRow.deaths).where(lost).with_for_update())
            if died is None:
                return False
            if died + 1 >= MOST_DEATHS:
                return self._end(connection, job, "failed", WORKER_DIED)
            return self._queue_again(connection, job, deaths=literal(1))

    def _end(self, connection: Connection, job: JobRecord, status: JobStatus, error: dict[str, Any] | None) -> bool:
        """End a claimed job; return False where it is not the caller's.

        Waiting jobs with the same fingerprint, of other owners, end the same way, unless the server was at fault. Those
        that have an earlier result succeed with it.
        """
        is_server_fault = error is not None and error["status"] >= 500
        equal = and_(JobRow.fingerprint == job.fingerprint, JobRow.status == "queued")
        # Lock the row. Else a job that is cancelled now would not end, but the jobs that wait for its plan would.
        if connection.scalar(select(JobRow.number).where(still_running(job)).with_for_update()) is None:
            return False
        ending = update(JobRow).where(still_running(job) if is_server_fault else or_(still_running(job), equal))
        ending = ending.values(
            status=_or_succeeded(status),
            error=None if error is None else json.dumps(error),
            finished_at=self._database.now(),
            lease_until=None,
        )
        ended = connection.execute(ending.returning(JobRow.number, JobRow.id, JobRow.status)).all()
        for row in ended:
            self._announce(connection, row.number, row.id, row.status)
        return any(row.number == job.number for row in ended)

    def _queue_again(self, connection: Connection, job: JobRecord, *, deaths: Any) -> bool:
        statement = update(JobRow).where(still_running(job))
        statement = statement.values(status="queued", started_at=None, lease_until=None, deaths=JobRow.deaths + deaths)
        if connection.execute(statement).rowcount == 0:
            return False
        self._announce(connection, job.number, job.id, "queued")
        return True

    def _announce(self, connection: Connection, number: int, job_id: str, status: JobStatus) -> None:
        connection.execute(insert(EventRow).values(job_number=number, data=json.dumps({"stage": status})))
        if status == "queued" and self._queued is not None:
            self._queued(connection, job_id)


def _or_succeeded(status: JobStatus) -> ColumnElement[str]:
    """Return the status with which a job ends that would end with ``status``: one with a result keeps that."""
    planned = exists().where(PlanRow.fingerprint == JobRow.fingerprint)
    return case((planned, "succeeded"), else_=status)


def delete_jobs(connection: Connection, numbers: Sequence[int]) -> None:
    """Delete jobs and their events."""
    connection.execute(delete(EventRow).where(EventRow.job_number.in_(numbers)))
    connection.execute(delete(JobRow).where(JobRow.number.in_(numbers)))
