"""``shardplan worker``: a process that plans jobs of a PostgreSQL database, on any machine that reaches it."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import procrastinate
import psycopg
import structlog
from procrastinate.exceptions import ConnectorException
from procrastinate.jobs import Status
from prometheus_client import start_http_server

from api.jobs.database import UNREACHABLE, Database
from api.jobs.housekeeping import housekeeper
from api.jobs.logs import configure_logs
from api.jobs.metrics import Metrics
from api.jobs.pg_queue import QUEUE, CallQueue, answering_app, install
from api.jobs.settings import ServerSettings, read_settings
from api.jobs.solver_main import SOLVE, Solve
from api.jobs.solver_process import SolverProcess, preload
from api.jobs.store import JobStore
from api.jobs.supervisor import Supervisor
from planner.errors import JobError

_PAUSE_S = 1.0
_AWAY = (ConnectorException, psycopg.Error, OSError)


def work(options: dict[str, Any]) -> None:
    """Plan jobs until SIGTERM or SIGINT.

    Raises:
        JobError: a setting is invalid, the database is not PostgreSQL, or the number of workers is 0.
    """
    settings = read_settings({name: value for name, value in options.items() if name != "metrics_port"})
    if not settings.url.startswith("postgresql"):
        advice = "Give --database-url postgresql://...; with SQLite, `shardplan serve` plans by itself."
        raise JobError("a worker needs a PostgreSQL database.", what_to_do=advice, field="database_url")
    if settings.workers == 0:
        advice = "Give --workers 1 or more; 0 is for `shardplan serve`."
        raise JobError("this worker would plan nothing.", what_to_do=advice, field="workers")
    configure_logs()
    preload()
    asyncio.run(RemoteWorker(settings, SOLVE).run(metrics_port=options.get("metrics_port")))


class RemoteWorker:
    """A worker that claims and plans jobs when the queue calls, up to ``settings.workers`` at a time.

    While it plans as many, it plans one more, of an owner who has none running: the long jobs of one owner never make
    another's first job wait.
    """

    def __init__(self, settings: ServerSettings, job: Solve | str) -> None:
        self._settings = settings
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._database = Database(settings.url)
        self._calls = CallQueue(self._database)
        self._store = JobStore(self._database, queued=self._calls.call, limits=settings.limits)
        self._stopping = threading.Event()
        self._metrics = Metrics()
        self._processes = [SolverProcess(job, settings.job_memory_bytes) for _ in range(settings.workers)]
        self._free: queue.SimpleQueue[SolverProcess] = queue.SimpleQueue()
        self._spare = SolverProcess(job, settings.job_memory_bytes)
        # One thread per solver process; asyncio's default executor is sized by the number of cores.
        self._threads = ThreadPoolExecutor(settings.workers + 1, thread_name_prefix="shardplan")

    async def run(self, *, metrics_port: int | None = None) -> None:
        """Plan jobs until SIGTERM or SIGINT, then requeue the jobs that run."""
        with self._opened(metrics_port):
            log = structlog.get_logger().bind(worker=self._name)
            loop = asyncio.get_running_loop()
            stopped = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop, stopped)
            log.info("worker started", workers=self._settings.workers)
            while not stopped.is_set():
                working = asyncio.create_task(self._answer_calls())
                waiting = asyncio.create_task(stopped.wait())
                await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
                working.cancel()
                try:
                    await working
                except asyncio.CancelledError:
                    pass
                except _AWAY as error:
                    log.warning("database unreachable", error=type(error).__name__)
                with suppress(TimeoutError):
                    await asyncio.wait_for(waiting, _PAUSE_S)
            log.info("worker stopped")

    @contextmanager
    def _opened(self, metrics_port: int | None) -> Iterator[None]:
        self._database.migrate()
        install(self._database)
        self._calls.open()
        settings = self._settings
        keeper = housekeeper(
            self._database,
            self._store,
            self._calls,
            lease_s=settings.lease_s,
            keep_days=settings.keep_days,
            most_kept=settings.max_kept_per_token,
            most_bytes=settings.max_kept_bytes_per_token,
        )
        for process in self._processes:
            process.start()
            self._free.put(process)
        keeper.start()
        if metrics_port is not None:
            start_http_server(metrics_port, addr=settings.host, registry=self._metrics.registry)
        try:
            yield
        finally:
            keeper.stop()
            self._stopping.set()
            self._threads.shutdown()  # the threads requeue their jobs before they end
            for process in (*self._processes, self._spare):
                process.end()
            self._calls.close()
            self._database.close()

    async def _answer_calls(self) -> None:
        app = answering_app(self._database, self._plan)
        async with app.open_async():
            await self._drop_stalled(app)
            await app.run_worker_async(
                queues=[QUEUE],
                name=self._name,
                concurrency=self._settings.workers + 1,
                fetch_job_polling_interval=2.0,
                delete_jobs="always",
                install_signal_handlers=False,
            )

    async def _drop_stalled(self, app: procrastinate.App) -> None:
        # Delete the calls that dead workers had taken. Their jobs are requeued, with new calls, when the leases expire.
        for call in await app.job_manager.get_stalled_jobs(queue=QUEUE):
            await app.job_manager.finish_job(call, Status.FAILED, delete_job=True)

    async def _plan(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._plan_waiting)

    def _plan_waiting(self) -> None:
        """Claim and plan waiting jobs; the spare process plans one at most.

        A call that finds nothing to claim is lost, but the worker that is free next claims the job all the same.
        """
        try:
            process = self._free.get_nowait()
        except queue.Empty:
            self._plan_one(self._spare, spare=True)
            self._spare.end()
            return
        try:
            while self._plan_one(process):
                pass
        finally:
            self._free.put(process)

    def _plan_one(self, process: SolverProcess, *, spare: bool = False) -> bool:
        if self._stopping.is_set():
            return False
        try:
            job = self._store.claim(worker=self._name, lease_s=self._settings.lease_s, spare=spare)
            if job is not None:
                limits = self._settings.solve_limits
                Supervisor(self._store, process, limits, self._stopping, self._metrics).run(job)
        except UNREACHABLE as error:
            structlog.get_logger().warning("call not answered", error=type(error).__name__)
            return False
        return job is not None

    def _stop(self, stopped: asyncio.Event) -> None:
        self._stopping.set()
        stopped.set()
