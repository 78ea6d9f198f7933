"""Requests that wait for the end of a job."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

from fastapi import Query, Request
from starlette.concurrency import run_in_threadpool

from api.http.auth import without_token
from api.http.service import Service
from api.jobs.database import UNREACHABLE
from api.jobs.store import JobRecord

_MOST_S = 60
_LOOK_S = 1.0
"""Seconds between two looks at whether the client is still there and its token valid."""
_NO_EVENTS = 2**62
"""Above the number of every event."""

Wait = Annotated[
    float,
    Query(
        ge=0,
        le=_MOST_S,
        description="Seconds to wait for the end of the job; then it is answered as it is by then, at once where the "
        "server has too many open streams.",
    ),
]
"""The query parameter of a request that may wait."""


async def until_ended(request: Request, service: Service, job: JobRecord, wait_s: float) -> JobRecord:
    """Return ``job`` once it has ended, or as it is after ``wait_s``.

    A request that waits takes the place of an event stream, and no thread. Where no place is free, the client has gone
    or the server stops, nothing is waited for.

    Raises:
        HTTPException: 401 where the request's token has been revoked by now.
    """
    if wait_s == 0 or job.ended or not service.streams.take():
        return job
    until = time.monotonic() + wait_s
    try:
        ended = False
        with suppress(*UNREACHABLE):  # the job goes on, and the database may be back in time
            ended = (await service.news.now(job.number, _NO_EVENTS)).ended
        while not ended and not service.stopping.is_set() and not await request.is_disconnected():
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            ended = (await service.news.wait(job.number, _NO_EVENTS, timeout_s=min(_LOOK_S, left_s))).ended
            with suppress(*UNREACHABLE):
                if not await service.guard.still_knows(request):
                    raise without_token()
    finally:
        service.streams.give_back()
    return await run_in_threadpool(service.store.get, job.id) or job
