"""Plans that a request names by the ids of their jobs: the processes that read requests have no database."""

from __future__ import annotations

import json
from typing import Any

from api.http.auth import Caller
from api.http.routes.plans import PLANS
from api.http.service import Service
from planner.errors import PlanError


def named_plans(service: Service, caller: Caller, body: bytes, *fields: str) -> dict[str, dict[str, str]]:
    """Return {id: its plan and request, as JSON text} for each of ``fields`` of a body that is the id of a job.

    A body that cannot be read has none: whoever reads it says what is wrong with it.

    Raises:
        HTTPException: 404 as `JobCollection.found`.
        PlanError: a job has no plan.
    """
    plans = {}
    for job_id in _texts(body, fields):
        job = PLANS.found(service, caller, job_id)
        if job.result_json is None:
            advice = "Name one that has succeeded."
            raise PlanError(f"job {job.id} is {job.status} and has no plan.", what_to_do=advice)
        plans[job_id] = {"plan": job.result_json, "request": job.request_json}
    return plans


def _texts(body: bytes, fields: tuple[str, ...]) -> list[str]:
    try:
        values: Any = json.loads(body)
    except (ValueError, RecursionError):
        return []
    found = [values.get(field) for field in fields] if isinstance(values, dict) else []
    return [value for value in found if isinstance(value, str)]
