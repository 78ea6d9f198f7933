"""``/v1/checks``: configurations of frameworks, checked, as jobs."""

from __future__ import annotations

from api.frameworks.requests import CheckJob, CheckRequest, check_check, check_fingerprint
from api.http.auth import Caller
from api.http.bodies import parse
from api.http.routes.job_routes import CheckedRequest, JobCollection, job_router, printable
from api.http.service import Service


def _checked(service: Service, caller: Caller, body: bytes) -> CheckedRequest:
    request = parse(CheckRequest, body)
    check_check(request)
    model = request.model if isinstance(request.model, str) else "a model"
    return CheckedRequest(
        fingerprint=check_fingerprint(request),
        request=request.model_dump(mode="json"),
        label=printable(f"check: {model[:300]}"),
    )


router = job_router(
    JobCollection(
        path="/v1/checks", kinds=("check",), body=CheckRequest, answer=CheckJob, result="result", checked=_checked
    )
)
