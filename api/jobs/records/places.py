"""The place of a waiting job in the queue, an estimate from queries that read few rows."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, and_, case, func, or_, select

from api.jobs.database import Database
from api.jobs.records.job import JobRecord
from api.jobs.tables import JobRow

_RECENT, _ENDED = 500, 20
"""The last jobs that are looked at for ended ones, and the most of these whose durations count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a waiting job.

    Attributes:
        position: 1 for the job that is claimed next, if no other is added.
        expected_wait_s: seconds until it is claimed, if it and those before it take as long as the last jobs did; None:
            no job runs, or none has ended.
    """

    position: int
    expected_wait_s: float | None


def place_of(database: Database, job: JobRecord) -> Place:
    """Return the place of a job that waits.

    Owners take turns. Whose turn comes first is told by the jobs that run now: the store reads all jobs for it.
    """
    with database.read() as connection:
        running = select(JobRow.owner, func.max(JobRow.started_at), func.count())
        running = running.where(JobRow.status == "running").group_by(JobRow.owner)
        rows = connection.execute(running).all()
        workers, started_at = sum(count for _, _, count in rows), {owner: last or 0.0 for owner, last, _ in rows}
        position = _position(connection, job, started_at)
        mean_s = _mean_duration_s(connection)
    expected = None if mean_s is None or not workers else round(position * mean_s / workers, 1)
    return Place(position=position, expected_wait_s=expected)


def _position(connection: Connection, job: JobRecord, started_at: dict[str, float]) -> int:
    """Return the place of ``job``; ``started_at`` is owner -> when the last of the owner's running jobs started."""
    earlier = or_(JobRow.queued_at < job.queued_at, and_(JobRow.queued_at == job.queued_at, JobRow.number < job.number))
    before = func.sum(case((earlier, 1), else_=0))
    waiting = select(JobRow.owner, func.count(), func.min(JobRow.queued_at), before)
    waiting = waiting.where(JobRow.status == "queued").group_by(JobRow.owner)
    others = []
    own_before, own_turn = 0, (started_at.get(job.owner, 0.0), job.queued_at)
    for owner, count, first, earlier_jobs in connection.execute(waiting):
        turn = (started_at.get(owner, 0.0), first)
        if owner == job.owner:
            own_before, own_turn = earlier_jobs, turn
        else:
            others.append((count, turn))
    # Until the owner's n-th job is claimed, each other owner has n turns, or n - 1 if the owner's comes first.
    turns = sum(min(count, own_before + (turn < own_turn)) for count, turn in others)
    return int(own_before + turns + 1)


def _mean_duration_s(connection: Connection) -> float | None:
    """Return the mean seconds of the last jobs that ran to their end; None where none did."""
    recent = JobRow.number > select(func.max(JobRow.number) - _RECENT).scalar_subquery()
    ran = and_(recent, JobRow.status.in_(("succeeded", "failed")), JobRow.started_at.is_not(None))
    durations = select((JobRow.finished_at - JobRow.started_at).label("seconds")).where(ran)
    last = durations.order_by(JobRow.number.desc()).limit(_ENDED).subquery()
    mean: float | None = connection.scalar(select(func.avg(last.c.seconds)))
    return mean
