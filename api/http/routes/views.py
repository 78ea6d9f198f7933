"""``/v1/plans/{id}``: ``/view``, what is drawn of a plan; ``/trace``, ``/report``, ``/export``; ``/request``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from api.http.auth import Caller, needs
from api.http.problems import problem_responses
from api.http.routes.plans import PLANS
from api.http.service import service_of

router = APIRouter(prefix="/v1/plans", tags=["plans"])

Reader = Annotated[Caller, Depends(needs("read"))]
_JSON_OBJECT: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": {"type": "object"}}}}}


@router.get(
    "/{job_id}/view", response_class=JSONResponse, responses={**_JSON_OBJECT, **problem_responses(404, 409, 422)}
)
async def view(job_id: str, request: Request, caller: Reader) -> Response:
    """Return all that the page shows of a job's plan: figures, layouts, timeline, memory over the step, and more."""
    return Response(await _made(request, caller, job_id, "view", with_request=True), media_type="application/json")


@router.get("/{job_id}/request", response_class=JSONResponse, responses={**_JSON_OBJECT, **problem_responses(404, 422)})
async def request_of(job_id: str, request: Request, caller: Reader) -> JSONResponse:
    """Return the request that a job answers, also where it failed; of a traced graph without the graph."""
    job = await run_in_threadpool(PLANS.found, service_of(request), caller, job_id)
    return JSONResponse(_without_graph(job.request))


@router.get(
    "/{job_id}/trace", response_class=JSONResponse, responses={**_JSON_OBJECT, **problem_responses(404, 409, 422)}
)
async def trace(
    job_id: str,
    request: Request,
    caller: Reader,
    ranks: Annotated[
        str, Query(pattern=r"^[0-9]{1,6}(,[0-9]{1,6}){0,63}$|^$", description="Ranks of a pipeline, such as 0,8.")
    ] = "",
) -> Response:
    """Return the predicted step as Chrome trace events, which Perfetto opens."""

    numbers = [int(rank) for rank in ranks.split(",") if rank]
    text = await _made(request, caller, job_id, "trace", ranks=numbers)
    return Response(text, media_type="application/json", headers=_download(job_id, "trace.json"))


@router.get(
    "/{job_id}/report",
    response_class=Response,
    responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}, **problem_responses(404, 409, 422)},
)
async def report(job_id: str, request: Request, caller: Reader) -> Response:
    """Return the plan as one self-contained HTML file."""
    text = await _made(request, caller, job_id, "report")
    return Response(text, media_type="text/html", headers=_download(job_id, "plan.html"))


@router.get(
    "/{job_id}/export", response_class=JSONResponse, responses={**_JSON_OBJECT, **problem_responses(404, 409, 422)}
)
async def export(
    job_id: str,
    request: Request,
    caller: Reader,
    to: Annotated[str, Query(min_length=1, max_length=50, description="Name of a framework, or torch.")],
) -> Response:
    """Return the plan as a framework's configuration: its file, and what of the plan it expresses or loses."""

    return Response(await _made(request, caller, job_id, "export", to=to), media_type="application/json")


async def _made(
    request: Request, caller: Caller, job_id: str, function: str, *, with_request: bool = False, **arguments: Any
) -> str:
    """Return the text that a function of `api.http.work.functions` makes of a job's plan.

    Raises:
        HTTPException: 404 as `JobCollection.found`; 409 where the job has no plan.
    """
    service = service_of(request)
    job = await run_in_threadpool(PLANS.found, service, caller, job_id)
    plan = job.result_json
    if plan is None:
        raise HTTPException(409, f"The job is {job.status} and has no plan.")
    if with_request:
        arguments |= {"job_id": job.id, "asked": _without_graph(job.request)}
    text: str = await service.work.run(request, caller.owner, function, len(plan), plan=plan, **arguments)
    return text


def _without_graph(request: dict[str, Any]) -> dict[str, Any]:
    """Return a request without the graph that its client traced, which may be large; the client has it."""
    model = request.get("model")
    return {**request, "model": {"graph": None}} if isinstance(model, dict) and "graph" in model else request


def _download(job_id: str, name: str) -> dict[str, str]:
    """Return headers that let a browser save the response, and keep it from running as a page of this server."""
    return {
        "Content-Disposition": f'attachment; filename="shardplan-{job_id[:8]}-{name}"',
        "Content-Security-Policy": "sandbox",
        "X-Content-Type-Options": "nosniff",
    }
