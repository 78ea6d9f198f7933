"""The HTTP service: plans as jobs. It builds no model and solves nothing itself; workers do (``api.jobs``)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any, cast

import structlog
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from api.body_limit import BodyLimit
from api.errors import MEDIA_TYPE, UserError, problem_of
from api.jobs import JobRunner
from api.planning import check_request, fingerprint
from api.schemas import Health, PlanJob, PlanRequest, Problem
from api.settings import ServerSettings
from api.store import JobRecord, JobStore

_PROBLEM: dict[str, Any] = {"model": Problem, "content": {MEDIA_TYPE: {}}}


def create_app(settings: ServerSettings) -> FastAPI:
    """Return the service; when it is started it opens its database in ``settings.data_dir`` and starts its workers."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        store = JobStore(settings.data_dir / "jobs.sqlite3")
        runner = JobRunner(store, workers=settings.workers, timeout_s=settings.job_timeout_s)
        app.state.store, app.state.runner = store, runner
        runner.start()
        try:
            yield
        finally:
            runner.stop()
            store.close()
            structlog.get_logger().info("stopped")

    app = FastAPI(
        title="shardplan",
        summary="Sharding plans for PyTorch models, made without a GPU",
        version=metadata.version("shardplan"),
        lifespan=lifespan,
    )
    app.state.max_queued = settings.max_queued
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    _add_problem_handlers(app)
    _add_routes(app)
    return app


def _add_routes(app: FastAPI) -> None:
    app.add_api_route(
        "/v1/plans",
        submit,
        methods=["POST"],
        status_code=202,
        response_model=PlanJob,
        responses={
            200: {"model": PlanJob, "description": "Planned before"},
            413: _PROBLEM,
            422: _PROBLEM,
            503: _PROBLEM,
        },
    )
    app.add_api_route("/v1/plans/{job_id}", read, methods=["GET"], response_model=PlanJob, responses={404: _PROBLEM})
    app.add_api_route(
        "/v1/plans/{job_id}",
        cancel,
        methods=["DELETE"],
        response_model=PlanJob,
        responses={404: _PROBLEM, 409: _PROBLEM},
    )
    app.add_api_route("/healthz", healthz, methods=["GET"], response_model=Health)


def submit(plan_request: PlanRequest, request: Request, response: Response) -> PlanJob:
    """Ask for a plan: 202 and a job to look at again, or 200 and the finished job where the same was asked before."""
    check_request(plan_request, allow_local=False)
    store, runner = _parts(request)
    key = fingerprint(plan_request, allow_local=False)
    assert key is not None, "only factories have no fingerprint, and a client cannot name one"
    known = store.find(key)
    if known is None or known.may_be_tried_again:
        if store.counts().get("queued", 0) >= request.app.state.max_queued:
            raise HTTPException(503, "Too many jobs are waiting; try again later.", headers={"Retry-After": "60"})
        known = store.add(key, plan_request.model_dump(mode="json"))
        runner.wake()
    response.headers["Location"] = f"/v1/plans/{known.id}"
    if known.status in {"succeeded", "failed"}:
        response.status_code = 200
    return _shown(known)


def read(job_id: str, request: Request) -> PlanJob:
    """Look at a job."""
    store, _ = _parts(request)
    return _shown(_found(store, job_id))


def cancel(job_id: str, request: Request) -> PlanJob:
    """Cancel a job that waits or runs."""
    store, runner = _parts(request)
    _found(store, job_id)
    if not runner.cancel(job_id):
        raise HTTPException(409, "The job has ended already.")
    return _shown(_found(store, job_id))


def healthz(request: Request) -> Health:
    """Tell that the server answers, and how busy it is."""
    store, _ = _parts(request)
    counts = store.counts()
    return Health(version=request.app.version, queued=counts.get("queued", 0), running=counts.get("running", 0))


def _parts(request: Request) -> tuple[JobStore, JobRunner]:
    return cast(JobStore, request.app.state.store), cast(JobRunner, request.app.state.runner)


def _found(store: JobStore, job_id: str) -> JobRecord:
    job = store.get(job_id)
    if job is None:
        raise HTTPException(404, f"There is no job {job_id[:64]!r}.")
    return job


def _shown(job: JobRecord) -> PlanJob:
    error = None if job.error is None else Problem.model_validate(job.error)
    return PlanJob(id=job.id, status=job.status, plan=job.plan, error=error)


def _add_problem_handlers(app: FastAPI) -> None:
    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        faults = [{"where": ".".join(map(str, item["loc"])), "what": item["msg"]} for item in error.errors()]
        detail = "; ".join(f"{fault['where']}: {fault['what']}" for fault in faults[:5])
        return _answer({"title": "The request is malformed", "status": 422, "detail": detail, "errors": faults})

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        problem = {"title": _TITLES.get(error.status_code, "The request failed"), "status": error.status_code}
        return _answer({**problem, "detail": error.detail}, headers=dict(error.headers or {}))

    async def user_error(_: Request, error: Exception) -> Response:
        return _answer(problem_of(error))

    async def our_error(request: Request, error: Exception) -> Response:
        structlog.get_logger().error("request failed", path=request.url.path, exc_info=error)
        return _answer(problem_of(error))

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(StarletteHTTPException, http_error)
    for kind in UserError:
        app.add_exception_handler(kind, user_error)
    app.add_exception_handler(Exception, our_error)


_TITLES = {
    400: "The request is malformed",
    404: "Not found",
    405: "Method not allowed",
    409: "Too late",
    413: "Too large",
    503: "Busy",
}


def _answer(problem: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    content = {"type": "about:blank", **problem}
    return JSONResponse(content, status_code=problem["status"], media_type=MEDIA_TYPE, headers=headers)
