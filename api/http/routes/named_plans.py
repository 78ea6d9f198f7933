"""Plans that a request names by the ids of their jobs: the processes that read requests have no database."""

from __future__ import annotations

import re
from typing import Any

from api.http.auth import Caller
from api.http.routes.plans import PLANS
from api.http.service import Service

_MOST = 4


def named_plans(service: Service, caller: Caller, body: bytes, *fields: str) -> dict[str, dict[str, Any]]:
    """Return {id: its status, plan and request, the last two as JSON text} for what may be ids in ``fields`` of a body.

    The body is searched, not read: a large one would keep others waiting. Whoever reads it takes what it does name, and
    says what is wrong. Jobs that the caller may not see are left out; a job without a plan has None for it.
    """
    names = "|".join(fields)
    found = re.findall(rb'"(?:%s)"\s*:\s*"([0-9a-f]{32})"' % names.encode(), body)
    plans = {}
    for job_id in list(dict.fromkeys(found))[:_MOST]:
        job = service.store.get(job_id.decode(), owner=caller.sees)
        if job is not None and job.kind in PLANS.kinds:
            plans[job.id] = {"status": job.status, "plan": job.result_json, "request": job.request_json}
    return plans
