"""``/healthz``, ``/readyz`` and ``/metrics``, for load balancers and operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, HTTPException, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import State

from api.http.auth import Caller, needs
from api.http.problems import problem_responses
from api.http.service import service_of
from api.jobs.metrics import CONTENT_TYPE
from api.requests.schemas import Health, Readiness
from planner.errors import JobError

router = APIRouter(tags=["operations"])
_CHECK_S = 1.0
_Route = TypeVar("_Route", bound=Callable[..., Any])


def _probe(path: str, **described: Any) -> Callable[[_Route], _Route]:
    """Return the decorator of a route for GET and HEAD; the OpenAPI document describes GET only."""

    def add(route: _Route) -> _Route:
        router.add_api_route(path, route, methods=["GET", "HEAD"], include_in_schema=False, **described)
        router.add_api_route(path, route, methods=["GET"], **described)
        return route

    return add


@_probe("/healthz", response_model=Health)
async def healthz(request: Request) -> Health:
    """Return the version of the running server. Nothing else is checked, and no token is needed."""
    return Health(version=request.app.version)


@_probe("/readyz", response_model=Readiness, responses=problem_responses())
async def readyz(request: Request) -> Readiness:
    """Return whether jobs are accepted: the database answers, its tables are of this version, and its disk has room.

    No token is needed. Without an answer of the database within a second, it is 503, and so it is until the processes
    that read requests have started.
    """
    service = service_of(request)
    check = _running_check(request.app.state)
    await asyncio.wait([check], timeout=_CHECK_S)
    if not check.done():
        raise HTTPException(503, f"The database did not answer within {_CHECK_S:g} s.")
    try:
        check.result()
    except JobError as error:
        raise HTTPException(503, str(error)) from error
    if service.stopping.is_set():
        raise HTTPException(503, "The server is stopping.")
    if not service.work.is_ready:
        raise HTTPException(503, "The server is starting.")
    return Readiness(database="postgresql" if service.database.is_postgresql else "sqlite")


def _running_check(state: State) -> asyncio.Task[None]:
    """Return the server's check of its database, which is started unless it runs: what hangs holds one thread only."""
    check: asyncio.Task[None] | None = getattr(state, "check", None)
    if check is None or check.done():
        work = to_thread.run_sync(state.service.database.check, abandon_on_cancel=True, limiter=CapacityLimiter(1))
        check = state.check = asyncio.ensure_future(work)
        check.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it any more
    return check


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **problem_responses()},
)
async def metrics(request: Request, caller: Annotated[Caller, Depends(needs("read"))]) -> Response:
    """Return the metrics in the format of Prometheus."""
    text = await run_in_threadpool(service_of(request).metrics.text)
    return Response(text, media_type=CONTENT_TYPE)
