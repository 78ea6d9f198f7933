"""The reader that all streams and waiting requests share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import pytest
from sqlalchemy.exc import OperationalError

from api.http import job_news
from api.http.job_news import JobNews
from api.jobs.database import Database
from api.jobs.events import News, read_news
from api.jobs.store import JobStore

FOLLOWERS = 120


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """What each query of the shared reader asks for; it queries every 20 ms."""
    asked: list[dict[int, int]] = []

    def counted(database: Database, after: Mapping[int, int]) -> dict[int, News]:
        asked.append(dict(after))
        return read_news(database, after)

    monkeypatch.setattr(job_news, "read_news", counted)
    monkeypatch.setattr(job_news, "_POLL_S", 0.02)
    return asked


async def events_until_end(news: JobNews, job: int, after: int = 0) -> list[int]:
    seen: list[int] = []
    while True:
        found = await news.wait(job, after, timeout_s=10.0)
        assert found, "nothing within ten seconds"
        seen += [event.number for event in found.events]
        after = max([after, *seen])
        if found.ended:
            return seen


def test_all_followers_share_one_query_and_each_sees_all_of_its_job(
    database: Database, queries: list[dict[int, int]]
) -> None:
    store = JobStore(database)
    jobs = [store.add(name, {"model": name}) for name in ("a", "b")]

    async def follow_all() -> tuple[list[list[int]], float]:
        news, began = JobNews(database, asyncio.Event()), time.monotonic()
        first = (await news.now(jobs[0].number, 0)).events[0].number
        followers = [events_until_end(news, jobs[i % 2].number, first if i % 3 == 0 else 0) for i in range(FOLLOWERS)]
        tasks = [asyncio.create_task(follower) for follower in followers]
        for job in jobs:
            await asyncio.sleep(0.1)
            await asyncio.to_thread(store.cancel, job.id)
        return await asyncio.gather(*tasks), time.monotonic() - began

    seen, took_s = asyncio.run(follow_all())
    for i, job in enumerate(jobs):
        every = [event.number for event in read_news(database, {job.number: 0})[job.number].events]
        assert all(numbers in (every, every[1:]) for numbers in seen[i::2])
        assert every in seen[i::2]
    assert len(queries) <= 2 + took_s / 0.02
    assert max(len(asked) for asked in queries) == len(jobs)


def test_a_follower_that_comes_amid_a_query_misses_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch, queries: list[dict[int, int]]
) -> None:
    store = JobStore(database)
    job = store.add("f", {"model": "a"})
    counted: Callable[..., dict[int, News]] = job_news.read_news

    def slow(*arguments: object) -> dict[int, News]:
        found = counted(*arguments)
        time.sleep(0.2)
        return found

    monkeypatch.setattr(job_news, "read_news", slow)

    async def follow_both() -> tuple[list[int], list[int]]:
        news = JobNews(database, asyncio.Event())
        first = read_news(database, {job.number: 0})[job.number].events[0].number
        late = asyncio.create_task(events_until_end(news, job.number, first))
        while not queries:
            await asyncio.sleep(0.005)
        store.cancel(job.id)
        return await asyncio.create_task(events_until_end(news, job.number)), await late

    whole, rest = asyncio.run(follow_both())
    assert len(whole) == 2
    assert rest == whole[1:]


def test_followers_outlive_a_database_that_is_away_and_end_with_the_server(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobStore(database).add("f", {"model": "a"})
    away = [1, 1, 1]

    def read_or_not(database: Database, after: Mapping[int, int]) -> dict[int, News]:
        if away:
            away.pop()
            raise OperationalError("", {}, Exception())
        return read_news(database, after)

    monkeypatch.setattr(job_news, "read_news", read_or_not)
    monkeypatch.setattr(job_news, "_AWAY_S", 0.01)

    async def follow_and_stop() -> tuple[News, News]:
        stopping = asyncio.Event()
        news = JobNews(database, stopping)
        found = await news.wait(job.number, 0, timeout_s=10.0)
        waiting = asyncio.create_task(news.wait(job.number, found.events[-1].number, timeout_s=60.0))
        await asyncio.sleep(0)
        stopping.set()
        return found, await waiting

    began = time.monotonic()
    found, last = asyncio.run(follow_and_stop())
    assert (len(found.events), found.ended, last) == (1, False, News())
    assert time.monotonic() - began < 10
