"""``/v1/comparisons``: alternatives, Pareto fronts, sweeps over device counts and batches, as jobs."""

from __future__ import annotations

from api.http.routes.job_routes import JobCollection, job_router
from api.requests.comparisons import ComparisonJob, ComparisonRequest

router = job_router(
    JobCollection(
        path="/v1/comparisons",
        kinds=("alternatives", "pareto", "sweep", "batches"),
        body=ComparisonRequest,
        answer=ComparisonJob,
        result="result",
        function="comparison request",
    )
)
