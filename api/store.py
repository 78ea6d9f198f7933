"""The database that is the queue and the record: one row per request, in SQLite under the data directory."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sqlalchemy import String, Text, create_engine, func, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from api.schemas import JobStatus


class _Base(DeclarativeBase):
    pass


class _JobRow(_Base):
    __tablename__ = "jobs"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    fingerprint: Mapped[str] = mapped_column(String(64), unique=True)
    status: Mapped[str] = mapped_column(String(16), index=True)
    request: Mapped[str] = mapped_column(Text)
    plan: Mapped[str | None] = mapped_column(Text, default=None)
    error: Mapped[str | None] = mapped_column(Text, default=None)
    queued_at: Mapped[float]
    started_at: Mapped[float | None] = mapped_column(default=None)
    finished_at: Mapped[float | None] = mapped_column(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as it stands: its request, then its plan or its error, all as JSON values."""

    id: str
    status: JobStatus
    request: dict[str, Any]
    plan: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def may_be_tried_again(self) -> bool:
        """Whether the outcome was not the request's: it was cancelled, or the server (status 500) failed."""
        return self.status == "cancelled" or (self.error or {}).get("status") == 500


class JobStore:
    """The jobs on disk. Every method is one transaction, and may be called from any thread."""

    def __init__(self, file: Path) -> None:
        self._engine = create_engine(f"sqlite:///{file}", connect_args={"timeout": 30})
        _Base.metadata.create_all(self._engine)

    def close(self) -> None:
        """Close the database's file."""
        self._engine.dispose()

    def add(self, fingerprint: str, request: dict[str, Any]) -> JobRecord:
        """Return the job of this fingerprint: queued if there was none, and again if it may be tried again."""
        row = {"id": uuid.uuid4().hex, "fingerprint": fingerprint, "status": "queued", "request": json.dumps(request)}
        with self._session() as session:
            session.execute(insert(_JobRow).values(**row, queued_at=time.time()).on_conflict_do_nothing())
            job = _record(session.scalars(select(_JobRow).where(_JobRow.fingerprint == fingerprint)).one())
        if job.may_be_tried_again:
            return self._queue_again(job)
        return job

    def get(self, job_id: str) -> JobRecord | None:
        """Return the job of this id, or None."""
        with self._session() as session:
            row = session.scalars(select(_JobRow).where(_JobRow.id == job_id)).one_or_none()
            return None if row is None else _record(row)

    def find(self, fingerprint: str) -> JobRecord | None:
        """Return the job of this fingerprint, or None."""
        with self._session() as session:
            row = session.scalars(select(_JobRow).where(_JobRow.fingerprint == fingerprint)).one_or_none()
            return None if row is None else _record(row)

    def claim(self) -> JobRecord | None:
        """Return the job that has waited longest, now running, or None; no two callers get the same one."""
        first = select(_JobRow.number).where(_JobRow.status == "queued").order_by(_JobRow.queued_at).limit(1)
        claim = update(_JobRow).where(_JobRow.number == first.scalar_subquery(), _JobRow.status == "queued")
        with self._session() as session:
            row = session.scalars(
                claim.values(status="running", started_at=time.time()).returning(_JobRow)
            ).one_or_none()
            return None if row is None else _record(row)

    def succeed(self, job_id: str, plan: dict[str, Any]) -> None:
        """Record the plan of a running job."""
        self._move(job_id, "running", status="succeeded", plan=json.dumps(plan), finished_at=time.time())

    def fail(self, job_id: str, error: dict[str, Any]) -> None:
        """Record the problem details that a running job ended with."""
        self._move(job_id, "running", status="failed", error=json.dumps(error), finished_at=time.time())

    def put_back(self, job_id: str) -> None:
        """Queue a running job again, at its old place."""
        self._move(job_id, "running", status="queued", started_at=None)

    def cancel(self, job_id: str) -> bool:
        """Cancel a job that waits or runs; False where it does neither."""
        moved = [
            self._move(job_id, status, status="cancelled", finished_at=time.time()) for status in ("queued", "running")
        ]
        return any(moved)

    def put_back_interrupted(self) -> int:
        """Queue again what was running when the server ended; return how many jobs that were."""
        with self._session() as session:
            statement = update(_JobRow).where(_JobRow.status == "running").values(status="queued", started_at=None)
            return len(session.scalars(statement.returning(_JobRow.number)).all())

    def counts(self) -> dict[str, int]:
        """Return how many jobs there are in each status."""
        with self._session() as session:
            rows = session.execute(select(_JobRow.status, func.count().label("jobs")).group_by(_JobRow.status)).all()
            return {row.status: row.jobs for row in rows}

    def _queue_again(self, job: JobRecord) -> JobRecord:
        fresh = {"status": "queued", "error": None, "queued_at": time.time(), "started_at": None, "finished_at": None}
        self._move(job.id, job.status, **fresh)
        again = self.get(job.id)
        assert again is not None
        return again

    def _move(self, job_id: str, old_status: str, **values: Any) -> bool:
        # Only from the status that the caller saw: a job cancelled meanwhile stays cancelled.
        statement = update(_JobRow).where(_JobRow.id == job_id, _JobRow.status == old_status).values(**values)
        with self._session() as session:
            return session.scalars(statement.returning(_JobRow.number)).one_or_none() is not None

    @contextmanager
    def _session(self) -> Iterator[Session]:
        with Session(self._engine) as session, session.begin():
            yield session


def _record(row: _JobRow) -> JobRecord:
    return JobRecord(
        id=row.id,
        status=cast(JobStatus, row.status),
        request=json.loads(row.request),
        plan=None if row.plan is None else json.loads(row.plan),
        error=None if row.error is None else json.loads(row.error),
    )
