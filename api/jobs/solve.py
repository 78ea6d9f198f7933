"""The solve function of solver processes. Importing this module imports torch, before the first request arrives."""

from __future__ import annotations

from typing import Any

import structlog

from api.frameworks.requests import CheckRequest
from api.jobs.comparisons import comparison_rows
from api.jobs.solver_main import OUT_OF_MEMORY, Outcome, Report
from api.render.explanation import explanation_dict
from api.requests.comparisons import ComparisonRequest
from api.requests.errors import UserError, problem_of
from api.requests.explanations import ExplanationRequest, check_explanation
from api.requests.plan_request import explained, plan_request
from api.requests.schemas import PlanRequest
from executor.torch_internals.caches import empty_caches_of_shapes
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import Planned, Progress


def solve(request: dict[str, Any], report: Report, time_limit_s: float) -> Outcome:
    """Return the plan, the other result or the error of a client's request.

    Args:
        request: the request as JSON data: a `PlanRequest` where it has no ``kind``, a `ComparisonRequest`, an
            `ExplanationRequest`, or a `CheckRequest`.
        report: called with each progress event.
        time_limit_s: seconds for the search, which then returns its incumbent.
    """
    try:
        return _outcome(request, lambda event: report(event.to_dict()), time_limit_s)
    except UserError as error:
        return {"error": problem_of(error)}
    except MemoryError:
        return {"error": {**OUT_OF_MEMORY, "detail": "It was refused more memory."}}
    except Exception as error:  # noqa: BLE001
        # The boundary of the process: any exception becomes the job's error, and the process takes the next request.
        structlog.get_logger().exception("job failed", model=str(request.get("model"))[:100])
        return {"error": problem_of(error)}
    finally:
        empty_caches_of_shapes()


def _outcome(request: dict[str, Any], progress: Progress, time_limit_s: float) -> Outcome:
    kind = request.get("kind", "plan")
    if kind == "plan":
        plan = plan_request(
            PlanRequest.model_validate(request), allow_local=False, progress=progress, time_limit_s=time_limit_s
        )
        progress(_planned(plan))
        return {"plan": plan.to_dict()}
    if kind == "check":
        return {"result": CheckRequest.model_validate(request).checked(progress).to_dict()}
    if kind == "explanation":
        return {"result": _explanation(ExplanationRequest.model_validate(request), progress)}
    comparison = ComparisonRequest.model_validate(request).root
    return {"result": comparison_rows(comparison, progress=progress, time_limit_s=time_limit_s)}


def _explanation(request: ExplanationRequest, progress: Progress) -> dict[str, Any]:
    check_explanation(request)
    plan = ShardingPlan.from_dict(request.plan_document)
    return explanation_dict(
        explained(request.model_spec, plan, request.parameter, allow_local=False, progress=progress)
    )


def _planned(plan: ShardingPlan) -> Planned:
    """Return the event that ends a solve."""
    return Planned(
        mesh=str(plan.mesh.spec),
        step_time_s=None if plan.estimate is None else plan.estimate.step_time_s,
        gap=None if plan.solver is None else plan.solver.gap,
    )
