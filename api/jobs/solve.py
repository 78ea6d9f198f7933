"""The solve function of solver processes. Importing this module imports torch, before the first request arrives."""

from __future__ import annotations

from typing import Any

import structlog

from api.jobs.solver_main import OUT_OF_MEMORY, Outcome, Report
from api.requests.errors import UserError, problem_of
from api.requests.plan_request import plan_request
from api.requests.schemas import PlanRequest
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import Planned


def solve(request: dict[str, Any], report: Report, time_limit_s: float) -> Outcome:
    """Return the plan or the error of a client's request.

    Args:
        request: the request as JSON data (`PlanRequest`).
        report: called with each progress event.
        time_limit_s: seconds for the search, which then returns its incumbent.
    """
    try:
        request_model = PlanRequest.model_validate(request)
        plan = plan_request(
            request_model,
            allow_local=False,
            progress=lambda event: report(event.to_dict()),
            time_limit_s=time_limit_s,
        )
        report(_planned(plan).to_dict())
        return {"plan": plan.to_dict()}
    except UserError as error:
        return {"error": problem_of(error)}
    except MemoryError:
        return {"error": {**OUT_OF_MEMORY, "detail": "It was refused more memory."}}
    except Exception as error:  # noqa: BLE001
        # The boundary of the process: any exception becomes the job's error, and the process takes the next request.
        structlog.get_logger().exception("job failed", model=str(request.get("model"))[:100])
        return {"error": problem_of(error)}


def _planned(plan: ShardingPlan) -> Planned:
    """Return the event that ends a solve."""
    return Planned(
        mesh=str(plan.mesh.spec),
        step_time_s=None if plan.estimate is None else plan.estimate.step_time_s,
        gap=None if plan.solver is None else plan.solver.gap,
    )
