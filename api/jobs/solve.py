"""From a request to its outcome, in a solver process. Importing it brings torch, so that a process starts warm."""

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
    """Return the outcome of a request that a client sent; after ``time_limit_s`` the best plan so far."""
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
        # The boundary of the process: whatever it was is recorded with the job, and the worker lives on.
        structlog.get_logger().exception("job failed", model=str(request.get("model"))[:100])
        return {"error": problem_of(error)}


def _planned(plan: ShardingPlan) -> Planned:
    """Return the event that ends a solve."""
    return Planned(
        mesh=str(plan.mesh.spec),
        step_time_s=None if plan.estimate is None else plan.estimate.step_time_s,
        gap=None if plan.solver is None else plan.solver.gap,
    )
