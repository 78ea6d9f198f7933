"""``/healthz``, ``/readyz`` and ``/metrics``, for load balancers and operators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from starlette.concurrency import run_in_threadpool

from api.http.auth import Caller, needs
from api.http.problems import problem_responses
from api.http.service import service_of
from api.jobs.metrics import CONTENT_TYPE
from api.requests.schemas import Health, Readiness
from planner.errors import JobError

router = APIRouter(tags=["operations"])


@router.get("/healthz", response_model=Health)
async def healthz(request: Request) -> Health:
    """Return the version of the running server. Nothing else is checked, and no token is needed."""
    return Health(version=request.app.version)


@router.get("/readyz", response_model=Readiness, responses=problem_responses())
def readyz(request: Request) -> Readiness:
    """Return whether jobs are accepted: the database answers and its tables are of this version. Needs no token."""
    service = service_of(request)
    try:
        service.database.check()
    except JobError as error:
        raise HTTPException(503, str(error)) from error
    if service.stopping.is_set():
        raise HTTPException(503, "The server is stopping.")
    return Readiness(database="postgresql" if service.database.is_postgresql else "sqlite")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **problem_responses()},
)
async def metrics(request: Request, caller: Annotated[Caller, Depends(needs("read"))]) -> Response:
    """Return the metrics in the format of Prometheus."""
    text = await run_in_threadpool(service_of(request).metrics.text)
    return Response(text, media_type=CONTENT_TYPE)
