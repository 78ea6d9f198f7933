"""Embedded workers: threads of the server, each of which runs queued jobs in its own solver process."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import structlog

from api.jobs.database import UNREACHABLE
from api.jobs.metrics import Metrics
from api.jobs.solver_main import SOLVE, Solve
from api.jobs.solver_process import SolverProcess
from api.jobs.store import JobStore
from api.jobs.supervisor import SolveLimits, Supervisor

_IDLE_S = 1.0


class JobRunner:
    """The threads that run a store's queued jobs, ``workers`` at a time, in a process each: a crash affects one job."""

    def __init__(
        self, store: JobStore, *, workers: int, limits: SolveLimits, metrics: Metrics, job: Solve | str = SOLVE
    ) -> None:
        self._store = store
        self._stopping = threading.Event()
        self._queued = threading.Semaphore(0)
        self._workers = [
            _Worker(f"{socket.gethostname()}-{number}", store, self._stopping, self._queued, limits, metrics, job)
            for number in range(workers)
        ]

    def start(self) -> None:
        """Requeue the jobs that an earlier server left running, and start the workers."""
        interrupted = self._store.release_interrupted()
        waiting = len(self._store.waiting())
        structlog.get_logger().info("jobs found", interrupted=interrupted, waiting=waiting)
        for worker in self._workers:
            worker.start()

    def wake(self) -> None:
        """Wake a worker, since a job was queued."""
        self._queued.release()

    def stop(self) -> None:
        """Stop the workers, which requeue their running jobs."""
        self._stopping.set()
        self._queued.release(max(1, len(self._workers)))
        for worker in self._workers:
            worker.join()


class _Worker(threading.Thread):
    """A thread with one solver process."""

    def __init__(
        self,
        name: str,
        store: JobStore,
        stopping: threading.Event,
        queued: threading.Semaphore,
        limits: SolveLimits,
        metrics: Metrics,
        job: Solve | str,
    ) -> None:
        super().__init__(name=f"shardplan-{name}", daemon=True)
        self._worker = name
        self._store = store
        self._stopping = stopping
        self._queued = queued
        self._limits = limits
        self._process = SolverProcess(job, limits.memory_bytes)
        self._supervisor = Supervisor(store, self._process, limits, stopping, metrics)

    def run(self) -> None:
        with suppress(OSError):  # the first job tries again, and reports the failure
            self._process.start()
        while not self._stopping.is_set():
            with suppress(*UNREACHABLE):
                while self._plan_one():
                    pass
            # The timeout finds jobs without a wake-up: those that waited for an equal job, or for the database.
            self._queued.acquire(timeout=_IDLE_S)
        self._process.end()

    def _plan_one(self) -> bool:
        if self._stopping.is_set():
            return False
        job = self._store.claim(worker=self._worker, lease_s=self._limits.lease_s)
        if job is None:
            return False
        self._supervisor.run(job)
        return True
