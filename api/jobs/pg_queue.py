"""The queue on PostgreSQL: procrastinate calls workers on any machine when a job waits.

A procrastinate task is only a call, and does not determine the job. A called worker claims a job, with a lease, in the
jobs' own table (`api.jobs.store`). So a call that is lost or made twice does no harm, and makes no job run twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import procrastinate
from procrastinate.exceptions import AlreadyEnqueued
from sqlalchemy import Connection, text

from api.jobs.database import AnsweringConnection, Database

QUEUE = "shardplan"
TASK = "shardplan.plan"
_SCHEMA_LOCK = 7_301_866_052_714_003


def install(database: Database) -> None:
    """Create procrastinate's tables if they do not exist."""
    with database.write() as connection:
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})"))
        if connection.scalar(text("SELECT to_regclass('procrastinate_jobs')")) is None:
            driver = connection.connection.driver_connection
            assert driver is not None
            driver.execute(procrastinate.schema.SchemaManager.get_schema())


class CallQueue:
    """The calling side of the queue, for servers and for workers that requeue a job."""

    def __init__(self, database: Database) -> None:
        connector = procrastinate.SyncPsycopgConnector(
            conninfo=database.url,
            kwargs=database.connect_options,
            connection_class=AnsweringConnection,
            max_size=4,
        )
        self._app = procrastinate.App(connector=connector)

    def open(self) -> None:
        """Connect."""
        self._app.open()

    def close(self) -> None:
        """Disconnect."""
        self._app.close()

    def call(self, connection: Connection, job_id: str) -> None:
        """Call for a job in the transaction that queues the job, so that both are committed or neither."""
        driver = connection.connection.driver_connection
        self._app.configure_task(TASK, queue=QUEUE, connection=driver).defer(job_id=job_id)

    def call_again(self, job_ids: Sequence[str]) -> None:
        """Call again for jobs that still wait, except those for which an earlier call of this method still waits."""
        for job_id in job_ids:
            with suppress(AlreadyEnqueued):
                self._app.configure_task(TASK, queue=QUEUE, queueing_lock=job_id).defer(job_id=job_id)


def answering_app(database: Database, answer: Callable[[], Awaitable[None]]) -> procrastinate.App:
    """Return the called side of the queue, a procrastinate app that runs ``answer`` for each call."""
    connector = procrastinate.PsycopgConnector(conninfo=database.url, kwargs=database.connect_options, max_size=8)
    app = procrastinate.App(connector=connector)

    @app.task(name=TASK, queue=QUEUE)
    async def plan(job_id: str) -> None:
        await answer()

    return app
