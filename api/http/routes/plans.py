"""``/v1/plans``: plans as jobs."""

from __future__ import annotations

from api.http.auth import Caller
from api.http.bodies import parse
from api.http.routes.job_routes import CheckedRequest, JobCollection, job_router, label_of
from api.http.service import Service
from api.requests.plan_request import check_request, fingerprint
from api.requests.schemas import PlanJob, PlanRequest


def _checked(service: Service, caller: Caller, body: bytes) -> CheckedRequest:
    request = parse(PlanRequest, body)
    check_request(request, allow_local=False)
    name = fingerprint(request, allow_local=False)
    assert name is not None, "only factories have no fingerprint, and a client cannot name one"
    return CheckedRequest(fingerprint=name, request=request.model_dump(mode="json"), label=label_of(request))


PLANS = JobCollection(
    path="/v1/plans", kinds=("plan",), body=PlanRequest, answer=PlanJob, result="plan", checked=_checked
)
"""The jobs that make plans."""

router = job_router(PLANS)
