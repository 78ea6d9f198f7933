"""``/v1/explanations``: the prices of all layouts of a parameter, as jobs."""

from __future__ import annotations

from api.http.routes.job_routes import JobCollection, job_router
from api.http.routes.named_plans import named_plans
from api.requests.explanations import ExplanationJob, ExplanationRequest

router = job_router(
    JobCollection(
        path="/v1/explanations",
        kinds=("explanation",),
        body=ExplanationRequest,
        answer=ExplanationJob,
        result="result",
        function="explanation request",
        plans=lambda service, caller, body: named_plans(service, caller, body, "plan"),
    )
)
