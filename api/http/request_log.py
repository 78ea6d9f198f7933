"""A log line and a metric for each request, under a request id that the response carries."""

from __future__ import annotations

import re
import time
import uuid

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.jobs.metrics import Metrics

_ID = re.compile(rb"[A-Za-z0-9_.-]{1,64}")
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


class RequestLog:
    """ASGI middleware that logs each request under its ``X-Request-ID``: the client's if well-formed, else a new id."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = header.decode() if _ID.fullmatch(header) else uuid.uuid4().hex
        started = time.perf_counter()
        status = 500

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id.encode())]}
            await send(message)

        with structlog.contextvars.bound_contextvars(request=request_id):
            try:
                await self._app(scope, receive, named)
            finally:
                self._record(scope, status, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        # The route's template, such as /v1/plans/{job_id}: with the path, each job would be a time series.
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.requested(method, route, status, seconds)
        # Level debug for the routes that load balancers request every second.
        log = structlog.get_logger()
        write = log.debug if route in {"/healthz", "/readyz", "/metrics"} else log.info
        write("request", method=method, path=scope["path"][:200], status=status, ms=round(seconds * 1e3, 2))
