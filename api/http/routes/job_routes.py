"""The routes that every collection of jobs has: submit, list, read, cancel, and follow the events."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from api.http.auth import Caller, caller_of, needs
from api.http.bodies import as_text, describes, read_body
from api.http.problems import problem_responses
from api.http.routes.events import EVENTS, event_stream
from api.http.routes.waiting import Wait, until_ended
from api.http.service import Service, service_of
from api.jobs.records.places import Place, place_of
from api.jobs.store import JobRecord
from api.requests.schemas import JobKind, JobPage, JobStatus, JobSummary

Reader = Annotated[Caller, Depends(needs("read"))]
Planner = Annotated[Caller, Depends(needs("plan"))]
_JOB_ID = re.compile(r"[0-9a-f]{32}")
_MOST_NUMBER = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCollection:
    """The jobs of some kinds, under one path.

    Attributes:
        path: such as ``/v1/plans``.
        kinds: kinds of the jobs. Jobs of other kinds are not found.
        body: schema of the request body.
        answer: schema of a job.
        result: member of the answer that has the result.
        function: name of the function of `api.http.work.functions` that checks a body. It returns the ``fingerprint``,
            the ``request`` as JSON data and the ``label`` in lists; it refuses what a client has to correct.
        plans: returns the plans that a body names, for the function; None: it names none.
    """

    path: str
    kinds: tuple[JobKind, ...]
    body: type[BaseModel]
    answer: type[BaseModel]
    result: str
    function: str
    plans: Callable[[Service, Caller, bytes], dict[str, Any]] | None = None

    def found(self, service: Service, caller: Caller, job_id: str, *, is_brief: bool = False) -> JobRecord:
        """Return the job of this id; ``is_brief``: without its request and result.

        Raises:
            HTTPException: 404 where there is no such job, it is of another kind, or it belongs to an owner whose jobs
                the caller may not see.
        """
        job = service.store.get(job_id, owner=caller.sees, is_brief=is_brief) if _JOB_ID.fullmatch(job_id) else None
        if job is None or job.kind not in self.kinds:
            raise HTTPException(404, f"There is no job {job_id[:64]!r}.")
        return job

    async def current_answer(self, service: Service, job: JobRecord) -> bytes:
        """Return ``job`` as JSON, with its place in the queue where it waits."""
        place = await run_in_threadpool(place_of, service.database, job) if job.status == "queued" else None
        return self.answer_of(job, place)

    def answer_of(self, job: JobRecord, place: Place | None = None) -> bytes:
        """Return ``job`` as JSON; the stored text of the result is copied without parsing it."""
        placed = {} if place is None else {"position": place.position, "expected_wait_s": place.expected_wait_s}
        start = json.dumps({"id": job.id, "kind": job.kind, "status": job.status, **placed})[:-1]
        result, error = job.result_json or "null", job.error_json or "null"
        return f'{start}, "{self.result}": {result}, "error": {error}}}'.encode()

    def response(self, job_id: str, answer: bytes, status: int) -> Response:
        """Return the response to a submission."""
        headers = {"Location": f"{self.path}/{job_id}"}
        return Response(answer, status_code=status, media_type="application/json", headers=headers)

    def answered_before(self, service: Service, caller: Caller, body: bytes) -> Response | None:
        """Return the cached response to a submission; None where there is none."""
        answer = service.answers.get(caller.owner, self.named(body))
        if answer is None:
            return None
        service.metrics.submitted("cached")
        return self.response(answer.job_id, answer.body, 200)

    async def checked(self, request: Request, caller: Caller, body: bytes) -> dict[str, Any]:
        """Return the request in a body, checked by another process."""
        service = service_of(request)
        nbytes, arguments = len(body), {}
        if self.plans is not None:
            plans = arguments["plans"] = await run_in_threadpool(self.plans, service, caller, body)
            nbytes += sum(len(named["plan"] or "") for named in plans.values())
        checked: dict[str, Any] = await service.work.run(
            request, caller.owner, self.function, nbytes, body=as_text(body), **arguments
        )
        return checked

    def submitted(
        self, service: Service, caller: Caller, body: bytes, key: str | None, checked: dict[str, Any], refresh: bool
    ) -> JobRecord:
        """Return the job of a body, which was ``checked``; ``key`` is its idempotency key."""
        if key is None:
            return self._job_of_request(service, caller, checked, refresh)
        named = self.named(body) + (b" refresh" if refresh else b"")
        with service.keys.used(caller.owner, key, hashlib.sha256(named).hexdigest()) as used:
            job = None if used.job_id is None else service.store.get(used.job_id)
            if job is not None:
                service.metrics.submitted("known")
                return job
            job = self._job_of_request(service, caller, checked, refresh)
            used.job_id = job.id
            return job

    def named(self, body: bytes) -> bytes:
        """Return ``body`` such that equal bodies to two collections differ; those of plans are what they are."""
        return body if "plan" in self.kinds else self.path.encode() + b" " + body

    def _job_of_request(self, service: Service, caller: Caller, checked: dict[str, Any], refresh: bool) -> JobRecord:
        """Return the job of a request: an existing one of the same fingerprint, or one that is queued."""
        job = service.store.find(checked["fingerprint"], owner=caller.owner)
        if job is not None and not job.runs_again(refresh=refresh):
            service.metrics.submitted("cached" if job.ended else "known")
            return job
        fingerprint, request, label = checked["fingerprint"], checked["request"], checked["label"]
        job = service.store.add(fingerprint, request, owner=caller.owner, label=label, refresh=refresh)
        service.metrics.submitted("cached" if job.ended else "new")
        structlog.get_logger().info("job submitted", job=job.id, kind=job.kind, owner=caller.owner, status=job.status)
        return job


def job_router(jobs: JobCollection) -> APIRouter:
    """Return the router of a collection."""
    router = APIRouter(prefix=jobs.path, tags=[jobs.path.rpartition("/")[2]])
    _add_submit(router, jobs)
    _add_list_read_cancel(router, jobs)
    _add_events(router, jobs)
    return router


def _route_of_submissions(jobs: JobCollection) -> type[APIRoute]:
    """Return the class of a route that first looks for a cached response, if a request is no more than its body.

    FastAPI then reads no parameters and calls no dependencies, which take half of the time of such a response.
    """

    class SubmissionRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def answer(request: Request) -> Response:
                if request.scope["query_string"] or "idempotency-key" in request.headers:
                    return await handler(request)
                caller, body = await caller_of(request, "plan"), await read_body(request)
                return jobs.answered_before(service_of(request), caller, body) or await handler(request)

            return answer

    return SubmissionRoute


def _add_submit(router: APIRouter, jobs: JobCollection) -> None:
    async def submit(
        request: Request,
        caller: Planner,
        idempotency_key: Annotated[
            str | None, Header(description="A request sent again with it is the same job.")
        ] = None,
        refresh: Annotated[
            bool, Query(description="Search again where a time limit cut the search of an earlier result short.")
        ] = False,
        wait: Wait = 0.0,
    ) -> Response:
        """Submit a job: 202 and a job to poll, or 200 and the ended job where the same request was answered before."""
        service = service_of(request)
        body = await read_body(request)
        is_asked_anew = refresh or idempotency_key is not None
        answered = None if is_asked_anew else jobs.answered_before(service, caller, body)
        if answered is not None:
            return answered
        checked = await jobs.checked(request, caller, body)
        job = await run_in_threadpool(jobs.submitted, service, caller, body, idempotency_key, checked, refresh)
        job = await until_ended(request, service, job, wait)
        answer = await jobs.current_answer(service, job)
        if job.status == "succeeded" and not await run_in_threadpool(lambda: job.is_cut_short):
            service.answers.put(caller.owner, jobs.named(body), job.id, answer)
        return jobs.response(job.id, answer, 200 if job.ended else 202)

    router.add_api_route(
        "",
        submit,
        methods=["POST"],
        status_code=202,
        response_model=jobs.answer,
        responses={
            200: {"model": jobs.answer, "description": "Answered before"},
            **problem_responses(400, 404, 413, 415, 422),
        },
        openapi_extra=describes(jobs.body),
        route_class_override=_route_of_submissions(jobs),
    )


def _add_list_read_cancel(router: APIRouter, jobs: JobCollection) -> None:
    @router.get("", response_model=JobPage, responses=problem_responses(422))
    def list_jobs(
        request: Request,
        caller: Reader,
        status: JobStatus | None = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        before: Annotated[
            int | None, Query(ge=1, le=_MOST_NUMBER, description="The ``next`` of the page before.")
        ] = None,
    ) -> JobPage:
        """List the caller's jobs (an admin's: everybody's), the newest first, without their results."""
        store = service_of(request).store
        page = store.page(owner=caller.sees, kinds=jobs.kinds, status=status, before=before, limit=limit)
        return JobPage(jobs=[_summary(job) for job in page], next=page[-1].number if len(page) == limit else None)

    @router.get("/{job_id}", response_model=jobs.answer, responses=problem_responses(404, 422))
    async def read(job_id: str, request: Request, caller: Reader, wait: Wait = 0.0) -> Response:
        """Read a job, at once or when it has ended."""
        service = service_of(request)
        job = await run_in_threadpool(jobs.found, service, caller, job_id)
        job = await until_ended(request, service, job, wait)
        return Response(await jobs.current_answer(service, job), media_type="application/json")

    @router.delete("/{job_id}", response_model=jobs.answer, responses=problem_responses(404, 409, 422))
    def cancel(job_id: str, request: Request, caller: Planner) -> Response:
        """Cancel a job that waits or runs; its solver process ends within two seconds."""
        service = service_of(request)
        jobs.found(service, caller, job_id)
        if not service.store.cancel(job_id):
            raise HTTPException(409, "The job has ended already.")
        structlog.get_logger().info("job cancelled", job=job_id, owner=caller.owner)
        return Response(jobs.answer_of(jobs.found(service, caller, job_id)), media_type="application/json")


def _add_events(router: APIRouter, jobs: JobCollection) -> None:
    @router.get(
        "/{job_id}/events",
        response_class=StreamingResponse,
        responses={**EVENTS, **problem_responses(404, 422)},
    )
    async def follow(
        job_id: str,
        request: Request,
        caller: Reader,
        last_event_id: Annotated[str | None, Header(description="The id of the last event that was seen.")] = None,
    ) -> StreamingResponse:
        """Follow a job from its first event, or from the one after ``Last-Event-ID``, to its end."""
        service = service_of(request)
        job = await service.news.in_thread(lambda: jobs.found(service, caller, job_id, is_brief=True))
        return event_stream(request, service, job, last_event_id)


def _summary(job: JobRecord) -> JobSummary:
    return JobSummary(
        id=job.id,
        kind=job.kind,
        status=job.status,
        label=job.label,
        queued_at=job.queued_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        error=(job.error or {}).get("title"),
    )
