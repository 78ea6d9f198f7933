"""``/v1/plans/{id}``: ``/view``, what is drawn of a plan; ``/trace``, ``/report``, ``/export``; ``/request``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from api.frameworks.export import export_plan
from api.http.auth import Caller, needs
from api.http.problems import problem_responses
from api.http.routes.plans import PLANS
from api.http.service import service_of
from api.jobs.store import JobRecord
from api.view.plan_view import plan_view
from api.view.report import report_html
from api.view.trace import chrome_trace
from planner.plan.sharding_plan import ShardingPlan

router = APIRouter(prefix="/v1/plans", tags=["plans"])

Reader = Annotated[Caller, Depends(needs("read"))]
_JSON_OBJECT: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": {"type": "object"}}}}}


@router.get(
    "/{job_id}/view", response_class=JSONResponse, responses={**_JSON_OBJECT, **problem_responses(404, 409, 422)}
)
async def view(job_id: str, request: Request, caller: Reader) -> JSONResponse:
    """Return all that the page shows of a job's plan: figures, layouts, timeline, memory over the step, and more."""

    def answer() -> dict[str, Any]:
        job, plan = _planned(request, caller, job_id)
        return plan_view(plan, id=job.id, request=_without_graph(job.request))

    return JSONResponse(await run_in_threadpool(answer))


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
) -> JSONResponse:
    """Return the predicted step as Chrome trace events, which Perfetto opens."""

    def answer() -> dict[str, Any]:
        _, plan = _planned(request, caller, job_id)
        return chrome_trace(plan, ranks=[int(rank) for rank in ranks.split(",") if rank])

    return JSONResponse(await run_in_threadpool(answer), headers=_download(job_id, "trace.json"))


@router.get(
    "/{job_id}/report",
    response_class=Response,
    responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}, **problem_responses(404, 409, 422)},
)
async def report(job_id: str, request: Request, caller: Reader) -> Response:
    """Return the plan as one self-contained HTML file."""
    text = await run_in_threadpool(lambda: report_html(_planned(request, caller, job_id)[1]))
    return Response(text, media_type="text/html", headers=_download(job_id, "plan.html"))


@router.get(
    "/{job_id}/export", response_class=JSONResponse, responses={**_JSON_OBJECT, **problem_responses(404, 409, 422)}
)
async def export(
    job_id: str,
    request: Request,
    caller: Reader,
    to: Annotated[str, Query(min_length=1, max_length=50, description="Name of a framework, or torch.")],
) -> JSONResponse:
    """Return the plan as a framework's configuration: its file, and what of the plan it expresses or loses."""

    def answer() -> dict[str, Any]:
        return export_plan(_planned(request, caller, job_id)[1], to, allow_local=False).to_dict()

    return JSONResponse(await run_in_threadpool(answer))


def _planned(request: Request, caller: Caller, job_id: str) -> tuple[JobRecord, ShardingPlan]:
    """Return a job and its plan.

    Raises:
        HTTPException: 404 as `JobCollection.found`; 409 where the job has no plan.
    """
    job = PLANS.found(service_of(request), caller, job_id)
    plan = job.plan
    if plan is None:
        raise HTTPException(409, f"The job is {job.status} and has no plan.")
    return job, ShardingPlan.from_dict(plan)


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
