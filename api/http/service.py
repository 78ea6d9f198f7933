"""The state that all routes share: the parts of a running service, which start and stop together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import Request

from api.http.auth import Guard, RateLimit
from api.http.idempotency import IdempotencyKeys
from api.http.job_news import JobNews
from api.http.response_cache import Answers
from api.http.work.pool import WorkPool
from api.jobs.database import Database
from api.jobs.embedded_workers import JobRunner
from api.jobs.events import OpenStreams
from api.jobs.housekeeping import Housekeeper, housekeeper
from api.jobs.metrics import Metrics
from api.jobs.pg_queue import CallQueue
from api.jobs.settings import ServerSettings
from api.jobs.startup import open_database
from api.jobs.store import JobStore
from api.jobs.tokens import TokenStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The parts of a running service.

    Attributes:
        runner: the embedded workers; None with PostgreSQL, where ``shardplan worker`` processes plan.
        calls: the queue that wakes these processes; None with SQLite.
        keeper: the thread of periodic duties.
        news: what happens to jobs, for streams and waiting requests.
        work: the processes that read requests and draw plans.
        stopping: set when the server starts to shut down.
    """

    settings: ServerSettings
    database: Database
    store: JobStore
    keys: IdempotencyKeys
    answers: Answers
    guard: Guard
    metrics: Metrics
    runner: JobRunner | None
    calls: CallQueue | None
    keeper: Housekeeper
    streams: OpenStreams
    news: JobNews
    work: WorkPool
    stopping: asyncio.Event

    def stop(self) -> None:
        """Stop the embedded workers, which requeue their running jobs, and close the database."""
        self.keeper.stop()
        if self.runner is not None:
            self.runner.stop()
        if self.calls is not None:
            self.calls.close()
        self.database.close()
        self.work.stop()  # last: a process that is just being started has to be waited for


def start_service(settings: ServerSettings, metrics: Metrics) -> Service:
    """Return a service whose database is migrated to this version, and whose embedded workers (SQLite) are started."""
    database = open_database(settings)
    runner: JobRunner | None = None
    calls: CallQueue | None = None
    if database.is_postgresql:
        calls = CallQueue(database)
        calls.open()
        store = JobStore(database, queued=calls.call, limits=settings.limits)
    else:
        # Runner and store need each other: the store calls the runner's wake through a late-bound name.
        store = JobStore(database, queued=lambda *_: runner.wake() if runner else None, limits=settings.limits)
        runner = JobRunner(store, workers=settings.workers, limits=settings.solve_limits, metrics=metrics)
        runner.start()
    metrics.watch_jobs(store.counts)
    keeper = housekeeper(
        database,
        store,
        calls,
        lease_s=settings.lease_s,
        keep_days=settings.keep_days,
        most_kept=settings.max_kept_per_token,
        most_bytes=settings.max_kept_bytes_per_token,
    )
    keeper.start()
    work = WorkPool()
    work.start()
    rate = RateLimit(per_s=settings.requests_per_s, burst=settings.requests_burst)
    stopping = asyncio.Event()
    return Service(
        settings=settings,
        database=database,
        store=store,
        keys=IdempotencyKeys(database),
        answers=Answers(),
        guard=Guard(TokenStore(database), rate, metrics),
        metrics=metrics,
        runner=runner,
        calls=calls,
        keeper=keeper,
        streams=OpenStreams(settings.max_streams),
        news=JobNews(database, stopping),
        work=work,
        stopping=stopping,
    )


def service_of(request: Request) -> Service:
    """Return the service that handles ``request``."""
    service: Service = request.app.state.service
    return service
