"""`LargeBodies`: requests with large bodies are parsed and checked one at a time, so that all others go on meanwhile.

A traced graph of 50,000 ops takes seconds to check. On the threads that all requests share, a few dozen of them would
keep reads and probes waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from starlette.concurrency import run_in_threadpool

LARGE_BYTES = 50_000
"""Bytes of a body from which it takes its turn; a model's config has a few thousand."""

MOST_WAITING, MOST_WAITING_OF_OWNER = 32, 8
"""Large bodies that may wait, of all owners and of one; further ones are refused."""

Result = TypeVar("Result")


class LargeBodies:
    """The turns of large bodies; used on the event loop only."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)
        self._waiting: Counter[str] = Counter()

    async def run(
        self, request: Request, owner: str, body: bytes, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Return ``function(*arguments)``, run on a thread: at once, or, for a large body, when it is its turn.

        Raises:
            HTTPException: 503 where too many large bodies wait, or the client has gone before its turn.
        """
        if len(body) < LARGE_BYTES:
            return await run_in_threadpool(function, *arguments)
        if self._waiting[owner] >= MOST_WAITING_OF_OWNER or self._waiting.total() >= MOST_WAITING:
            raise HTTPException(503, "Too many large requests wait to be checked.")
        self._waiting[owner] += 1
        try:
            async with self._turn:
                if await request.is_disconnected():
                    raise HTTPException(503, "The client has gone.")
                return await run_in_threadpool(function, *arguments)
        finally:
            self._waiting[owner] -= 1
            self._waiting += Counter()  # owners without any are forgotten
