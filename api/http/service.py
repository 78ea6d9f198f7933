"""What the routes share: the parts of a running service, and how they start and stop together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fastapi import Request

from api.http.auth import Guard, RateLimit
from api.http.idempotency import IdempotencyKeys
from api.http.response_cache import Answers
from api.jobs.database import Database
from api.jobs.embedded_workers import JobRunner
from api.jobs.events import OpenStreams
from api.jobs.housekeeping import Housekeeper, housekeeper
from api.jobs.metrics import Metrics
from api.jobs.pg_queue import CallQueue, install
from api.jobs.settings import ServerSettings
from api.jobs.store import JobStore
from api.jobs.tokens import TokenStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The parts. ``runner`` is None where workers are elsewhere, ``calls`` where they are here."""

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
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """Stop the workers, which queue again what they are at, and close the database."""
        self.keeper.stop()
        if self.runner is not None:
            self.runner.stop()
        if self.calls is not None:
            self.calls.close()
        self.database.close()


def start_service(settings: ServerSettings, metrics: Metrics) -> Service:
    """Return a service whose database is of this version and whose workers, if they are here, are at work."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    database = Database(settings.url)
    database.migrate()
    runner: JobRunner | None = None
    calls: CallQueue | None = None
    if database.is_postgresql:
        install(database)
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
    )
    keeper.start()
    rate = RateLimit(per_s=settings.requests_per_s, burst=settings.requests_burst)
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
    )


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    service: Service = request.app.state.service
    return service
