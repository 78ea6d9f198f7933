"""Events of a job, in order, and the number of open event streams."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import and_, false, or_, select

from api.jobs.database import Database
from api.jobs.records.job import UNFINISHED
from api.jobs.tables import EventRow, JobRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a job: its number, larger than all earlier ones, and a JSON object with a ``stage``, as one line."""

    number: int
    data_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Events of a job, in order, and whether it has ended; false where there is neither."""

    events: Sequence[Event] = ()
    ended: bool = False

    def __bool__(self) -> bool:
        return bool(self.events) or self.ended

    def above(self, number: int) -> News:
        """Return these news without the events up to this number."""
        return News(events=[event for event in self.events if event.number > number], ended=self.ended)


def read_news(database: Database, after: Mapping[int, int]) -> dict[int, News]:
    """Return the news of several jobs: for each job's number, its events with numbers above ``after[number]``.

    A job that is gone has ended.
    """
    wanted = [and_(EventRow.job_number == job, EventRow.number > number) for job, number in after.items()]
    rows = select(EventRow.job_number, EventRow.number, EventRow.data).where(or_(false(), *wanted))
    statuses = select(JobRow.number).where(JobRow.number.in_(list(after)), JobRow.status.in_(UNFINISHED))
    with database.read() as connection:
        # The statuses are read first, so that an ended job's events are complete: none is written after its end.
        unfinished = set(connection.scalars(statuses))
        events: dict[int, list[Event]] = {job: [] for job in after}
        for row in connection.execute(rows.order_by(EventRow.number)):
            events[row.job_number].append(Event(number=row.number, data_json=row.data))
    return {job: News(events=events[job], ended=job not in unfinished) for job in after}


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
