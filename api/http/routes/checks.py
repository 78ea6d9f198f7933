"""``/v1/checks``: configurations of frameworks, checked, as jobs."""

from __future__ import annotations

from api.frameworks.requests import CheckJob, CheckRequest
from api.http.routes.job_routes import JobCollection, job_router

router = job_router(
    JobCollection(
        path="/v1/checks",
        kinds=("check",),
        body=CheckRequest,
        answer=CheckJob,
        result="result",
        function="check request",
    )
)
