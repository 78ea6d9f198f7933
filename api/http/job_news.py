"""What happens to jobs, for all streams and waiting requests together."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog
from anyio import CapacityLimiter, to_thread

from api.jobs.database import UNREACHABLE, Database
from api.jobs.events import News, read_news

T = TypeVar("T")

_POLL_S = 0.3
_THREADS = 2
_AWAY_S = 2.0
"""Seconds between two queries of a database that is away."""


@dataclass(eq=False, slots=True)
class _Follower:
    job_number: int
    after: int
    told: asyncio.Future[News]


class JobNews:
    """One reader of the database for all who follow jobs: it queries every 0.3 s, however many they are.

    Belongs to one event loop.
    """

    def __init__(self, database: Database, stopping: asyncio.Event) -> None:
        self._database = database
        self._stopping = stopping
        self._followers: set[_Follower] = set()
        self._reader: asyncio.Task[None] | None = None
        self._threads = CapacityLimiter(_THREADS)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Return the result of a function in one of the few threads that all streams share: others have their own."""
        return await to_thread.run_sync(function, limiter=self._threads)

    async def now(self, job_number: int, after: int) -> News:
        """Return the events of a job with numbers above ``after`` by now, and whether it has ended.

        Raises:
            OperationalError: and others of `api.jobs.database.UNREACHABLE` where the database does not answer.
        """
        return (await self.in_thread(lambda: read_news(self._database, {job_number: after})))[job_number]

    async def wait(self, job_number: int, after: int, *, timeout_s: float) -> News:
        """Wait for an event of a job with a number above ``after``, or for its end, for ``timeout_s`` at most.

        A server that stops, and a database that is away, are no news.
        """
        follower = _Follower(job_number, after, asyncio.get_running_loop().create_future())
        self._followers.add(follower)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(timeout_s):
                return await follower.told
        except TimeoutError:
            return News()
        finally:
            self._followers.discard(follower)

    async def _read(self) -> None:
        while self._followers and not self._stopping.is_set():
            await asyncio.sleep(_POLL_S)
            # One that comes during the query waits for the next: it may want earlier events than this query asks for.
            asked = tuple(self._followers)
            first: dict[int, int] = {}
            for follower in asked:
                first[follower.job_number] = min(follower.after, first.get(follower.job_number, follower.after))
            try:
                news = await self.in_thread(functools.partial(read_news, self._database, first))
            except UNREACHABLE as error:  # the streams go on when the database is back
                structlog.get_logger().warning("database unreachable", error=type(error).__name__)
                await asyncio.sleep(_AWAY_S)
                continue
            for follower in asked:
                _tell(follower, news[follower.job_number].above(follower.after))
        for follower in self._followers:
            _tell(follower, News(), always=True)


def _tell(follower: _Follower, news: News, *, always: bool = False) -> None:
    if (news or always) and not follower.told.done():
        follower.told.set_result(news)
