"""The HTTP application, which serves plans as jobs. Models are built and planned in solver processes only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata

import structlog
from fastapi import FastAPI

from api.frameworks.requests import CheckRequest
from api.http.bodies import describe_bodies
from api.http.body_limit import BodyLimit
from api.http.problems import add_problem_handlers
from api.http.request_log import RequestLog
from api.http.routes import catalogue, checks, comparisons, estimates, explanations, operations, page, plans, views
from api.http.service import start_service
from api.jobs.metrics import Metrics
from api.jobs.settings import ServerSettings
from api.requests.comparisons import ComparisonRequest
from api.requests.explanations import ExplanationRequest
from api.requests.schemas import DiffRequest, EstimateRequest, PlanRequest


def create_app(settings: ServerSettings) -> FastAPI:
    """Return the FastAPI application. At startup it opens its database and, with SQLite, starts its workers."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = start_service(settings, metrics)
        try:
            yield
        finally:
            app.state.service.stop()
            structlog.get_logger().info("stopped")

    app = FastAPI(
        title="shardplan",
        summary="Sharding plans for PyTorch models, made without a GPU",
        version=metadata.version("shardplan"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(RequestLog, metrics=metrics)
    add_problem_handlers(app)
    # The order matters: /v1/plans/diff must be matched before /v1/plans/{job_id}.
    for topic in (estimates, plans, comparisons, explanations, checks, views, catalogue, operations, page):
        app.include_router(topic.router)
    page.add_static_files(app)
    describe_bodies(app, PlanRequest, ComparisonRequest, ExplanationRequest, CheckRequest, EstimateRequest, DiffRequest)
    return app
