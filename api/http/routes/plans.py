"""``/v1/plans``: jobs are submitted, listed, read and cancelled."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from api.http.auth import Caller, needs
from api.http.bodies import describes, parse, read_body
from api.http.problems import problem_responses
from api.http.service import Service, service_of
from api.jobs.store import JobRecord
from api.requests.plan_request import check_request, fingerprint
from api.requests.schemas import JobStatus, JobSummary, PlanJob, PlanPage, PlanRequest

router = APIRouter(prefix="/v1/plans", tags=["plans"])

Reader = Annotated[Caller, Depends(needs("read"))]
Planner = Annotated[Caller, Depends(needs("plan"))]
_JOB_ID = re.compile(r"[0-9a-f]{32}")
_MOST_NUMBER = 2**63 - 1


@router.post(
    "",
    status_code=202,
    response_model=PlanJob,
    responses={
        200: {"model": PlanJob, "description": "Planned before"},
        **problem_responses(400, 404, 413, 415, 422),
    },
    openapi_extra=describes(PlanRequest),
)
async def submit(
    request: Request,
    caller: Planner,
    idempotency_key: Annotated[str | None, Header(description="A request sent again with it is the same job.")] = None,
) -> Response:
    """Submit a job: 202 and a job to poll, or 200 and the ended job where the same request was planned before."""
    service = service_of(request)
    body = await read_body(request)
    cached_answer = None if idempotency_key is not None else service.answers.get(caller.owner, body)
    if cached_answer is not None:
        service.metrics.submitted("cached")
        return _job_response(cached_answer.job_id, cached_answer.body, 200)
    job = await run_in_threadpool(_submit, service, caller, body, idempotency_key)
    answer = job_body(job)
    if job.status == "succeeded":
        service.answers.put(caller.owner, body, job.id, answer)
    return _job_response(job.id, answer, 200 if job.status in {"succeeded", "failed"} else 202)


def _submit(service: Service, caller: Caller, body: bytes, key: str | None) -> JobRecord:
    if key is None:
        return _job_of_request(service, caller, body)
    with service.keys.used(caller.owner, key, hashlib.sha256(body).hexdigest()) as used:
        job = None if used.job_id is None else service.store.get(used.job_id)
        if job is not None:
            service.metrics.submitted("known")
            return job
        job = _job_of_request(service, caller, body)
        used.job_id = job.id
        return job


def _job_of_request(service: Service, caller: Caller, body: bytes) -> JobRecord:
    """Return the job of a request: an existing one of the same fingerprint, or a new one."""
    plan_request = parse(PlanRequest, body)
    check_request(plan_request, allow_local=False)
    name = fingerprint(plan_request, allow_local=False)
    assert name is not None, "only factories have no fingerprint, and a client cannot name one"
    job = service.store.find(name, owner=caller.owner)
    if job is not None and not job.may_be_tried_again:
        service.metrics.submitted("cached" if job.ended else "known")
        return job
    job = service.store.add(name, plan_request.model_dump(mode="json"), owner=caller.owner, label=_label(plan_request))
    service.metrics.submitted("cached" if job.ended else "new")
    structlog.get_logger().info("job submitted", job=job.id, owner=caller.owner, status=job.status)
    return job


@router.get("", response_model=PlanPage, responses=problem_responses(422))
def list_jobs(
    request: Request,
    caller: Reader,
    status: JobStatus | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    before: Annotated[int | None, Query(ge=1, le=_MOST_NUMBER, description="The ``next`` of the page before.")] = None,
) -> PlanPage:
    """List the caller's jobs (an admin's: everybody's), the newest first, without their plans."""
    jobs = service_of(request).store.page(owner=caller.sees, status=status, before=before, limit=limit)
    return PlanPage(jobs=[_summary(job) for job in jobs], next=jobs[-1].number if len(jobs) == limit else None)


@router.get("/{job_id}", response_model=PlanJob, responses=problem_responses(404, 422))
def read(job_id: str, request: Request, caller: Reader) -> Response:
    """Read a job."""
    job = found_job(service_of(request), caller, job_id)
    return Response(job_body(job), media_type="application/json")


@router.delete("/{job_id}", response_model=PlanJob, responses=problem_responses(404, 409, 422))
def cancel(job_id: str, request: Request, caller: Planner) -> Response:
    """Cancel a job that waits or runs; its solver process ends within two seconds."""
    service = service_of(request)
    found_job(service, caller, job_id)
    if not service.store.cancel(job_id):
        raise HTTPException(409, "The job has ended already.")
    structlog.get_logger().info("job cancelled", job=job_id, owner=caller.owner)
    return Response(job_body(found_job(service, caller, job_id)), media_type="application/json")


def found_job(service: Service, caller: Caller, job_id: str) -> JobRecord:
    """Return the job of this id.

    Raises:
        HTTPException: 404 where there is no such job, or it belongs to an owner whose jobs the caller may not see.
    """
    job = service.store.get(job_id, owner=caller.sees) if _JOB_ID.fullmatch(job_id) else None
    if job is None:
        raise HTTPException(404, f"There is no job {job_id[:64]!r}.")
    return job


def job_body(job: JobRecord) -> bytes:
    """Return ``job`` as the JSON of a `PlanJob`; the plan's stored text is copied without parsing it."""
    start = json.dumps({"id": job.id, "status": job.status})[:-1]
    return f'{start}, "plan": {job.plan_json or "null"}, "error": {job.error_json or "null"}}}'.encode()


def _job_response(job_id: str, body: bytes, status: int) -> Response:
    headers = {"Location": f"/v1/plans/{job_id}"}
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def _label(plan_request: PlanRequest) -> str:
    """Return the label of a request in lists: its model and its cluster."""
    model, cluster = plan_request.model, plan_request.cluster_text
    if not isinstance(model, str):
        model_fields = model.model_dump()
        kind = (model_fields.get("hf_config") or {}).get("model_type")
        model = f"{next(iter(model_fields))} ({str(kind)[:100]})" if kind else next(iter(model_fields))
    where = cluster if isinstance(cluster, str) else str(cluster.get("device"))
    text = f"{model[:250]} on {where[:100]}"
    return "".join(letter if letter.isprintable() else "?" for letter in text)  # PostgreSQL's text has no NUL


def _summary(job: JobRecord) -> JobSummary:
    return JobSummary(
        id=job.id,
        status=job.status,
        label=job.label,
        queued_at=job.queued_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        error=(job.error or {}).get("title"),
    )
