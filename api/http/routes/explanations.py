"""``/v1/explanations``: the prices of all layouts of a parameter, as jobs."""

from __future__ import annotations

from api.http.auth import Caller
from api.http.bodies import parse
from api.http.routes.job_routes import CheckedRequest, JobCollection, job_router, printable
from api.http.routes.plans import PLANS
from api.http.service import Service
from api.requests.explanations import (
    ExplanationJob,
    ExplanationRequest,
    check_explanation,
    explanation_fingerprint,
)
from planner.errors import JobError, PlanError


def _checked(service: Service, caller: Caller, body: bytes) -> CheckedRequest:
    request = _with_plan(service, caller, parse(ExplanationRequest, body))
    check_explanation(request)
    return CheckedRequest(
        fingerprint=explanation_fingerprint(request),
        request=request.model_dump(mode="json"),
        label=printable(f"explanation: {request.parameter[:300]}"),
    )


def _with_plan(service: Service, caller: Caller, request: ExplanationRequest) -> ExplanationRequest:
    """Return ``request`` with the plan and the model of the job that it names.

    Raises:
        HTTPException: 404 as `JobCollection.found`. `PlanError`: the job has no plan. `JobError`: no model is named.
    """
    if isinstance(request.plan, str):
        job = PLANS.found(service, caller, request.plan)
        if job.plan is None:
            raise PlanError(f"job {job.id} is {job.status} and has no plan.", what_to_do="Name one that has succeeded.")
        request = request.with_plan(job.plan, job.request["model"])
    if request.model is None:
        advice = "Give the plan's model: a preset's name, or its hf_config."
        raise JobError("model is missing.", what_to_do=advice, field="model")
    return request


router = job_router(
    JobCollection(
        path="/v1/explanations",
        kinds=("explanation",),
        body=ExplanationRequest,
        answer=ExplanationJob,
        result="result",
        checked=_checked,
    )
)
