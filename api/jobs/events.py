"""Events of a job, in order, and the number of open event streams."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select

from api.jobs.database import Database
from api.jobs.tables import EventRow, JobRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a job: its number, larger than all earlier ones, and a JSON object with a ``stage``, as one line."""

    number: int
    data_json: str


def read_events(database: Database, job_number: int, after: int) -> tuple[Sequence[Event], bool]:
    """Return a job's events with numbers above ``after``, in order, and whether the job has ended."""
    statement = select(EventRow.number, EventRow.data).where(EventRow.job_number == job_number, EventRow.number > after)
    with database.read() as connection:
        # The status is read first, so that an ended job's events are complete: none is written after its end.
        status = connection.scalar(select(JobRow.status).where(JobRow.number == job_number))
        rows = connection.execute(statement.order_by(EventRow.number)).all()
    events = [Event(number=row.number, data_json=row.data) for row in rows]
    return events, status not in {"queued", "running"}


class OpenStreams:
    """A count of the open event streams, with an upper limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Count one more stream and return True; return False where the limit is reached."""
        with self._lock:
            if self._open >= self._most:
                return False
            self._open += 1
            return True

    def give_back(self) -> None:
        """Count one stream less."""
        with self._lock:
            self._open -= 1
