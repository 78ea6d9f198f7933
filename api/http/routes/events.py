"""A job's progress as server-sent events."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.http.service import Service
from api.jobs.database import UNREACHABLE
from api.jobs.events import News, OpenStreams
from api.jobs.store import JobRecord

_ALIVE_S = 10.0
_TOKEN_S = 1.0
"""Seconds between two looks at whether the token of a stream is still valid."""
_NUMBER = re.compile(r"[0-9]{1,18}")


EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events until the job has ended. `data` is a JSON object with a `stage`; `id` goes into "
        "`Last-Event-ID` to go on from there. Stages of the job: `queued`, `running`, `succeeded`, `failed`, "
        "`cancelled`. Stages of planning: `building the model`, `reading the graph`, `tracing`; `bounding` (`mesh`, "
        "`mesh_number` of `meshes`), `relaxing` and `solving` (`mesh`, `micro_batches`, `ac`), `bounding stage` and "
        "`relaxing stage` of pipelines, `best` where a faster plan was found; `planned`. Events of the search have, "
        "where known, `step_time_s` of the incumbent, `bound_s` that no plan beats, their `gap`, `tasks_done`, "
        "`nodes_open`. Those of a sweep and of batches have the `subject` that they plan for: a cluster, a batch. "
        "An explanation prices each `alternative` (`aspect`, `layout`).",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
"""OpenAPI entry of the response that streams events."""


def event_stream(request: Request, service: Service, job: JobRecord, last_event_id: str | None) -> StreamingResponse:
    """Return the response that streams a job's events from the first, or from the one after ``last_event_id``.

    Raises:
        HTTPException: 503 where too many streams are open.
    """
    after = int(last_event_id) if last_event_id and _NUMBER.fullmatch(last_event_id) else 0
    if not service.streams.take():
        raise HTTPException(503, "Too many event streams are open.", headers={"Retry-After": "10"})
    return _EventStream(_events(request, service, job.number, after), service.streams)


class _EventStream(StreamingResponse):
    """A response that streams events, and gives its place among the open streams back when it ends.

    The generator of the events cannot give it back: it never starts if the client disconnects before the first event.
    """

    def __init__(self, events: AsyncIterator[str], streams: OpenStreams) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.give_back()


async def _events(request: Request, service: Service, job_number: int, after: int) -> AsyncIterator[str]:
    last_sent = last_known = time.monotonic()
    news = News()
    with suppress(*UNREACHABLE):  # the news come when the database is back
        news = await service.news.now(job_number, after)
    while not service.stopping.is_set():
        for event in news.events:
            after, last_sent = event.number, time.monotonic()
            yield f"id: {event.number}\ndata: {event.data_json}\n\n"
        if news.ended or await request.is_disconnected():
            return
        if time.monotonic() - last_sent > _ALIVE_S:
            yield ": still there\n\n"
            last_sent = time.monotonic()
        news = await service.news.wait(job_number, after, timeout_s=_TOKEN_S)
        if time.monotonic() - last_known > _TOKEN_S:
            with suppress(*UNREACHABLE):
                if not await service.guard.still_knows(request):
                    return
                last_known = time.monotonic()
