"""Problem details (RFC 9457) for every error of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from api.jobs.database import UNREACHABLE
from api.requests.errors import MEDIA_TYPE, UserError, problem_of
from api.requests.schemas import Problem

_TITLES = {
    400: "The request is malformed",
    401: "Who asks is not known",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    408: "The body did not come",
    409: "Too late",
    413: "Too large",
    415: "Not JSON",
    422: "The request is malformed",
    429: "Too many requests",
    503: "Busy",
}
_RETRY_S = {429: "5", 503: "5"}
_CLIENT_LEFT = 499
"""The status in log and metrics of a request whose client left before all of it came: nobody gets the answer."""


class MalformedBodyError(Exception):
    """A body that does not match the model of its route.

    Attributes:
        error: pydantic's validation error.
    """

    def __init__(self, error: ValidationError) -> None:
        super().__init__(str(error))
        self.error = error

    @property
    def problem(self) -> dict[str, Any]:
        """The error as problem details."""
        return malformed_problem(self.error.errors(include_url=False, include_context=False, include_input=False))


class ProblemError(Exception):
    """An error that another process has put into problem details.

    Attributes:
        problem: the problem details, with their ``status``.
    """

    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(str(problem.get("detail")))
        self.problem = problem


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of a route's errors: ``statuses``, 401, 403, 429, 503, and 408 if it reads a body."""
    described = {"model": Problem, "content": {MEDIA_TYPE: {}}}
    every = {*statuses, 401, 403, 429, 503, *((408,) if 413 in statuses else ())}
    return {status: {**described, "description": _TITLES[status]} for status in sorted(every)}


def add_problem_handlers(app: FastAPI) -> None:
    """Register exception handlers so that ``app`` answers every error with problem details."""

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _answer(malformed_problem(error.errors()))

    async def malformed(_: Request, error: Exception) -> Response:
        assert isinstance(error, MalformedBodyError)
        return _answer(error.problem)

    async def told(_: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)
        return _answer(error.problem)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            error.headers = {"Allow": _methods(request)}
        problem = {"title": _TITLES.get(error.status_code, "The request failed"), "status": error.status_code}
        return _answer({**problem, "detail": error.detail}, error.headers)

    async def user_error(_: Request, error: Exception) -> Response:
        return _answer(problem_of(error))

    async def unreachable(request: Request, error: Exception) -> Response:
        structlog.get_logger().warning("database unreachable", path=request.url.path[:200], error=type(error).__name__)
        detail = "The database does not answer, or has no room; nothing was accepted."
        return _answer({"title": _TITLES[503], "status": 503, "detail": detail})

    async def left(_: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    async def our_error(request: Request, error: Exception) -> Response:
        structlog.get_logger().error("request failed", path=request.url.path[:200], exc_info=error)
        return _answer(problem_of(error))

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(MalformedBodyError, malformed)
    app.add_exception_handler(ProblemError, told)
    app.add_exception_handler(HTTPException, http_error)
    for kind in UserError:
        app.add_exception_handler(kind, user_error)
    for away in UNREACHABLE:
        app.add_exception_handler(away, unreachable)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(Exception, our_error)


def malformed_problem(errors: Any) -> dict[str, Any]:
    """Return pydantic's errors as problem details."""
    faults = [{"where": ".".join(map(str, item["loc"]))[:200], "what": item["msg"]} for item in errors[:50]]
    detail = "; ".join(": ".join(filter(None, (fault["where"], fault["what"]))) for fault in faults[:5])
    return {"title": _TITLES[422], "status": 422, "detail": detail, "errors": faults}


def _methods(request: Request) -> str:
    """Return the methods of all routes of a path; Starlette names those of the first route only."""
    routes: list[Any] = []
    for route in request.app.routes:
        included = getattr(route, "original_router", None)  # FastAPI keeps an included router as one route
        routes += [route] if included is None else included.routes
    matching = [r for r in routes if isinstance(r, Route) and r.matches(request.scope)[0] is Match.PARTIAL]
    return ", ".join(sorted({method for route in matching for method in route.methods or ()}))


def _answer(problem: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    content = {"type": "about:blank", **problem}
    status = problem["status"]
    retry = {"Retry-After": _RETRY_S[status]} if status in _RETRY_S else {}
    return JSONResponse(content, status_code=status, media_type=MEDIA_TYPE, headers={**retry, **(headers or {})})
