"""``/v1/plans/{id}/events``: a job's progress as server-sent events."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from api.http.auth import Caller, needs
from api.http.problems import problem_responses
from api.http.routes.plans import found_job
from api.http.service import Service, service_of
from api.jobs.events import OpenStreams, read_events

router = APIRouter(prefix="/v1/plans", tags=["plans"])

_POLL_S = 0.3
_ALIVE_S = 10.0
_NUMBER = re.compile(r"[0-9]{1,18}")


_DESCRIPTION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events until the job has ended. `data` is a JSON object with a `stage`; `id` goes into "
        "`Last-Event-ID` to go on from there. Stages of the job: `queued`, `running`, `succeeded`, `failed`, "
        "`cancelled`. Stages of planning: `building the model`, `reading the graph`, `tracing`; `bounding` (`mesh`, "
        "`mesh_number` of `meshes`), `relaxing` and `solving` (`mesh`, `micro_batches`, `ac`), `bounding stage` and "
        "`relaxing stage` of pipelines, `best` where a faster plan was found; `planned`. Events of the search have, "
        "where known, `step_time_s` of the incumbent, `bound_s` that no plan beats, their `gap`, `tasks_done`, "
        "`nodes_open`.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


@router.get(
    "/{job_id}/events",
    response_class=StreamingResponse,
    responses={**_DESCRIPTION, **problem_responses(404, 422)},
)
async def follow(
    job_id: str,
    request: Request,
    caller: Annotated[Caller, Depends(needs("read"))],
    last_event_id: Annotated[str | None, Header(description="The id of the last event that was seen.")] = None,
) -> StreamingResponse:
    """Follow a job from its first event, or from the one after ``Last-Event-ID``, to its end."""
    service = service_of(request)
    job = await run_in_threadpool(found_job, service, caller, job_id)
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
    last_sent = time.monotonic()
    while not service.stopping.is_set():
        new_events, ended = await run_in_threadpool(read_events, service.database, job_number, after)
        for event in new_events:
            after, last_sent = event.number, time.monotonic()
            yield f"id: {event.number}\ndata: {event.data_json}\n\n"
        if ended:
            return
        if time.monotonic() - last_sent > _ALIVE_S:
            yield ": still there\n\n"
            last_sent = time.monotonic()
        if await request.is_disconnected():
            return
        await asyncio.sleep(_POLL_S)
