"""Exit codes and HTTP problem details (RFC 9457) of errors.

Errors that a user can act on are ``PlannerError`` (with its exit code and HTTP status), and the ``ValueError``s that
``cost_model`` raises for an impossible cluster or layout, since ``cost_model`` does not import the planner.
"""

from __future__ import annotations

import re
from typing import Any

from api.requests.client_texts import for_client
from cost_model.hardware.cluster import ClusterError
from cost_model.layouts.errors import LayoutError
from planner.errors import PlannerError

UserError = (PlannerError, ClusterError, LayoutError)
"""Errors with a message for the user; any other is a bug of shardplan."""

MEDIA_TYPE = "application/problem+json"

_MOST_DETAIL = 20_000
"""Characters of a detail; one that repeats what a client sent could have as many as that."""


def exit_code_of(error: Exception) -> int:
    """Return the exit code of the command line for ``error``: 2 bad input, 3 infeasible, 4 does not run, 1 a bug."""
    if isinstance(error, PlannerError):
        return error.exit_code
    return 2 if isinstance(error, UserError) else 1


def problem_of(error: Exception) -> dict[str, Any]:
    """Return ``error`` as problem details for a client, whose texts name fields of requests.

    The error's attributes (``least_bytes``, ``field``, ...) become further members.
    """
    problem = error_data(error)
    texts: dict[str, Any] = {name: for_client(problem[name]) for name in ("detail", "what_to_do") if name in problem}
    if "errors" in problem:
        texts["errors"] = [{**fault, "what": for_client(fault["what"])} for fault in problem["errors"]]
    return {**problem, **texts}


def error_data(error: Exception) -> dict[str, Any]:
    """Return ``error`` as problem details for the command line, whose texts name its options."""
    if isinstance(error, PlannerError):
        data = {
            key: value
            for key, value in vars(error).items()
            if key not in {"detail", "what_to_do"} and value is not None
        }
        if error.what_to_do:
            data["what_to_do"] = error.what_to_do
        return _problem(type(error).__name__, error.title, error.http_status, error.detail, data)
    if isinstance(error, ClusterError):
        return _problem("ClusterError", "The cluster cannot be used", 422, str(error), {})
    if isinstance(error, LayoutError):
        return _problem("LayoutError", "The mesh or a layout cannot be used", 422, str(error), {})
    return _problem(
        "InternalError", "shardplan failed", 500, "The server met an error of its own; its log has more.", {}
    )


def _problem(kind: str, title: str, status: int, detail: str, data: dict[str, Any]) -> dict[str, Any]:
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", kind).lower()
    if len(detail) > _MOST_DETAIL:
        detail = f"{detail[:_MOST_DETAIL]} ..."
    return {"type": f"urn:shardplan:{name}", "title": title, "status": status, "detail": detail, **data}
