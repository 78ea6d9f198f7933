"""Embedded workers: threads of the server, each of which runs queued jobs in its own solver process.

While all of them are busy, a spare one runs jobs of owners who have none running: the long jobs of one owner never make
another's first job wait.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

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
        self._busy = _Busy(workers)
        # The spare worker has wake-ups of its own, so that it does not take those of the others.
        self._wake_ups = [threading.Semaphore(0), threading.Semaphore(0)]
        self._workers = [
            _Worker(
                f"{socket.gethostname()}-{number}",
                store,
                SolverProcess(job, limits.memory_bytes),
                limits,
                metrics,
                stopping=self._stopping,
                queued=self._wake_ups[spare],
                busy=self._busy,
                spare=spare,
            )
            for number, spare in enumerate([*[False] * workers, *[True] * bool(workers)])
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
        for wake_ups in self._wake_ups:
            wake_ups.release()

    def stop(self) -> None:
        """Stop the workers, which requeue their running jobs."""
        self._stopping.set()
        for wake_ups in self._wake_ups:
            wake_ups.release(max(1, len(self._workers)))
        for worker in self._workers:
            worker.join()


class _Busy:
    """How many of the workers run a job."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._running = 0
        self._lock = threading.Lock()

    @property
    def all(self) -> bool:
        """Whether all workers run a job."""
        return self._running >= self._workers

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count a worker during the block."""
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1


class _Worker(threading.Thread):
    """A thread with one solver process."""

    def __init__(
        self,
        name: str,
        store: JobStore,
        process: SolverProcess,
        limits: SolveLimits,
        metrics: Metrics,
        *,
        stopping: threading.Event,
        queued: threading.Semaphore,
        busy: _Busy,
        spare: bool,
    ) -> None:
        super().__init__(name=f"shardplan-{name}", daemon=True)
        self._worker = name
        self._store = store
        self._process = process
        self._limits = limits
        self._stopping = stopping
        self._queued = queued
        self._busy = busy
        self._spare = spare
        self._supervisor = Supervisor(store, process, limits, stopping, metrics)

    def run(self) -> None:
        if not self._spare:
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
        if self._stopping.is_set() or (self._spare and not self._busy.all):
            return False
        job = self._store.claim(worker=self._worker, lease_s=self._limits.lease_s, spare=self._spare)
        if job is None:
            return False
        with nullcontext() if self._spare else self._busy.one_more():
            self._supervisor.run(job)
        if self._spare:
            self._process.end()
        return True
