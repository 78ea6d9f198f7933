"""What the processes of `WorkPool` do: requests parsed and checked, plans compared, drawn and exported, prices.

Importing this module imports torch. Arguments and results are JSON data; large results are text, which the server
passes on as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import structlog
from pydantic import BaseModel

from api.frameworks.export import export_plan
from api.frameworks.requests import CheckRequest, check_check, check_fingerprint
from api.http.bodies import read_text
from api.http.problems import MalformedBodyError
from api.jobs.solver_main import OUT_OF_MEMORY, Outcome, Report
from api.render.plan_diff import diff_plans
from api.requests.comparisons import ComparisonRequest, check_comparison, comparison_fingerprint
from api.requests.errors import UserError, problem_of
from api.requests.explanations import ExplanationRequest, check_explanation, explanation_fingerprint
from api.requests.plan_request import check_request, fingerprint, read_client_cluster
from api.requests.price_configuration import price_configuration
from api.requests.schemas import DiffRequest, EstimateRequest, PlanRequest
from api.view.plan_view import plan_view
from api.view.report import report_html
from api.view.trace import chrome_trace
from planner.errors import JobError, PlanError, PlannerError
from planner.plan.sharding_plan import ShardingPlan


def answer(request: dict[str, Any], report: Report, time_limit_s: float) -> Outcome:
    """Return ``{"result": ...}`` of a function of this module, or ``{"error": ...}``, which has problem details.

    Args:
        request: name of the ``function``, and its ``arguments``.
        report: not called.
        time_limit_s: not read: the server ends this process.
    """
    try:
        return {"result": _FUNCTIONS[request["function"]](**request["arguments"])}
    except MalformedBodyError as error:
        return {"error": error.problem}
    except UserError as error:
        return {"error": problem_of(error)}
    except MemoryError:
        return {"error": {**OUT_OF_MEMORY, "status": 422, "detail": "Reading the request took too much memory."}}
    except Exception as error:  # noqa: BLE001
        # The boundary of the process, as in `api.jobs.solve`.
        structlog.get_logger().exception("work failed", function=request.get("function"))
        return {"error": problem_of(error)}


def _checked(request: BaseModel, name: str, label: str) -> dict[str, Any]:
    """Return a request that can be queued: its hash, its JSON data, and its text in lists."""
    return {"fingerprint": name, "request": request.model_dump(mode="json"), "label": printable(label)}


def _plan_request(body: str) -> dict[str, Any]:
    request = read_text(PlanRequest, body)
    check_request(request, allow_local=False)
    name = fingerprint(request, allow_local=False)
    assert name is not None, "only factories have no fingerprint, and a client cannot name one"
    return _checked(request, name, label_of(request))


def _comparison_request(body: str) -> dict[str, Any]:
    comparison = read_text(ComparisonRequest, body).root
    check_comparison(comparison)
    return _checked(
        comparison, comparison_fingerprint(comparison), f"{comparison.kind}: {label_of(comparison.request)}"
    )


def _check_request(body: str) -> dict[str, Any]:
    request = read_text(CheckRequest, body)
    check_check(request)
    model = request.model if isinstance(request.model, str) else "a model"
    return _checked(request, check_fingerprint(request), f"check: {model[:300]}")


def _explanation_request(body: str, plans: dict[str, Any]) -> dict[str, Any]:
    request = read_text(ExplanationRequest, body)
    if isinstance(request.plan, str):
        named = _named(plans, request.plan)
        request = request.with_plan(json.loads(named["plan"]), json.loads(named["request"])["model"])
    if request.model is None:
        advice = "Give the plan's model: a preset's name, or its hf_config."
        raise JobError("model is missing.", what_to_do=advice, field="model")
    check_explanation(request)
    return _checked(request, explanation_fingerprint(request), f"explanation: {request.parameter[:300]}")


def _estimate(body: str) -> dict[str, Any]:
    request = read_text(EstimateRequest, body)
    read_client_cluster(request.cluster)
    options = request.model_dump(exclude={"model"})
    return price_configuration(request.model_spec, allow_local=False, **options).to_dict()


def _diff(body: str, plans: dict[str, Any]) -> dict[str, Any]:
    request = read_text(DiffRequest, body)

    def plan(side: str | dict[str, Any]) -> ShardingPlan:
        return ShardingPlan.from_dict(json.loads(_named(plans, side)["plan"]) if isinstance(side, str) else side)

    return diff_plans(plan(request.left), plan(request.right)).to_dict()


def _view(plan: str, job_id: str, asked: dict[str, Any]) -> str:
    return json.dumps(plan_view(_read(plan), id=job_id, request=asked))


def _trace(plan: str, ranks: list[int]) -> str:
    return json.dumps(chrome_trace(_read(plan), ranks=ranks))


def _report(plan: str) -> str:
    return report_html(_read(plan))


def _export(plan: str, to: str) -> str:
    return json.dumps(export_plan(_read(plan), to, allow_local=False).to_dict())


class NoJobError(PlannerError):
    """A request names a job that the caller cannot read."""

    title = "Not found"
    http_status = 404


def _named(plans: dict[str, Any], job_id: str) -> dict[str, str]:
    """Return the plan and request of a job that a request names.

    Raises:
        NoJobError: there is no such job. `PlanError`: it has no plan.
    """
    named: dict[str, str] | None = plans.get(job_id)
    if named is None:
        raise NoJobError(f"There is no job {job_id[:64]!r}.", what_to_do="GET /v1/plans lists yours.")
    if named["plan"] is None:
        advice = "Name one that has succeeded."
        raise PlanError(f"job {job_id} is {named['status']} and has no plan.", what_to_do=advice)
    return named


def _read(plan: str) -> ShardingPlan:
    return ShardingPlan.from_dict(json.loads(plan))


def label_of(plan_request: PlanRequest) -> str:
    """Return the label of a request in lists: its model and its cluster."""
    model, cluster = plan_request.model, plan_request.cluster_text
    if not isinstance(model, str):
        model_fields = model.model_dump()
        kind = (model_fields.get("hf_config") or {}).get("model_type")
        model = f"{next(iter(model_fields))} ({str(kind)[:100]})" if kind else next(iter(model_fields))
    where = cluster if isinstance(cluster, str) else str(cluster.get("device"))
    return f"{model[:250]} on {where[:100]}"


def printable(text: str) -> str:
    """Return ``text`` with "?" for what cannot be printed, or stored: PostgreSQL's text has no NUL."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ready": lambda: None,
    "plan request": _plan_request,
    "comparison request": _comparison_request,
    "check request": _check_request,
    "explanation request": _explanation_request,
    "estimate": _estimate,
    "diff": _diff,
    "view": _view,
    "trace": _trace,
    "report": _report,
    "export": _export,
}
