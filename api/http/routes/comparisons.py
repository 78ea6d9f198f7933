"""``/v1/comparisons``: alternatives, Pareto fronts, sweeps over device counts and batches, as jobs."""

from __future__ import annotations

from api.http.auth import Caller
from api.http.bodies import parse
from api.http.routes.job_routes import CheckedRequest, JobCollection, job_router, label_of
from api.http.service import Service
from api.requests.comparisons import (
    ComparisonJob,
    ComparisonRequest,
    check_comparison,
    comparison_fingerprint,
)


def _checked(service: Service, caller: Caller, body: bytes) -> CheckedRequest:
    comparison = parse(ComparisonRequest, body).root
    check_comparison(comparison)
    return CheckedRequest(
        fingerprint=comparison_fingerprint(comparison),
        request=comparison.model_dump(mode="json"),
        label=f"{comparison.kind}: {label_of(comparison.request)}",
    )


router = job_router(
    JobCollection(
        path="/v1/comparisons",
        kinds=("alternatives", "pareto", "sweep", "batches"),
        body=ComparisonRequest,
        answer=ComparisonJob,
        result="result",
        checked=_checked,
    )
)
