"""Large bodies take turns: others go on meanwhile, too many are refused, what a client that left wants is dropped."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest
from fastapi import HTTPException, Request

from api.http.large_bodies import LARGE_BYTES, MOST_WAITING, MOST_WAITING_OF_OWNER, LargeBodies

LARGE, SMALL = b" " * LARGE_BYTES, b"{}"


class Client:
    """A request whose client may have gone."""

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone

    async def is_disconnected(self) -> bool:
        return self.gone


def request(*, gone: bool = False) -> Request:
    return cast(Request, Client(gone=gone))


async def until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come")


def test_large_bodies_take_turns_and_small_ones_do_not_wait() -> None:
    async def main() -> None:
        bodies, go = LargeBodies(), threading.Event()
        running: list[int] = []
        most = []

        def work(number: int) -> int:
            running.append(number)
            most.append(len(running))
            go.wait(10)
            running.remove(number)
            return number

        large = [asyncio.create_task(bodies.run(request(), "a", LARGE, work, number)) for number in range(3)]
        await until(lambda: running)
        assert await bodies.run(request(), "b", SMALL, lambda: "small") == "small"
        assert not any(task.done() for task in large)
        go.set()
        assert await asyncio.gather(*large) == [0, 1, 2]
        assert max(most) == 1

    asyncio.run(main())


def test_too_many_are_refused_those_of_one_owner_first() -> None:
    async def main() -> None:
        bodies, go = LargeBodies(), threading.Event()
        tasks = []

        async def add(owner: str, count: int) -> None:
            for _ in range(count):
                tasks.append(asyncio.create_task(bodies.run(request(), owner, LARGE, go.wait, 10)))
            await asyncio.sleep(0)

        await add("a", MOST_WAITING_OF_OWNER)
        with pytest.raises(HTTPException) as refused:
            await bodies.run(request(), "a", LARGE, go.wait)
        assert refused.value.status_code == 503
        for owner in "bcd":
            await add(owner, MOST_WAITING_OF_OWNER)
        assert len(tasks) == MOST_WAITING
        with pytest.raises(HTTPException):
            await bodies.run(request(), "e", LARGE, go.wait)
        assert await bodies.run(request(), "e", SMALL, lambda: "small") == "small"
        go.set()
        assert await asyncio.gather(*tasks) == [True] * MOST_WAITING
        assert await bodies.run(request(), "a", LARGE, lambda: "again") == "again"

    asyncio.run(main())


def test_what_a_client_that_has_gone_asked_for_is_dropped() -> None:
    async def main() -> None:
        bodies, done = LargeBodies(), []
        with pytest.raises(HTTPException):
            await bodies.run(request(gone=True), "a", LARGE, done.append, 1)
        assert not done
        await bodies.run(request(), "a", LARGE, done.append, 2)
        assert done == [2]

    asyncio.run(main())
