"""``/v1/plans``: plans as jobs."""

from __future__ import annotations

from api.http.routes.job_routes import JobCollection, job_router
from api.requests.schemas import PlanJob, PlanRequest

PLANS = JobCollection(
    path="/v1/plans", kinds=("plan",), body=PlanRequest, answer=PlanJob, result="plan", function="plan request"
)
"""The jobs that make plans."""

router = job_router(PLANS)
