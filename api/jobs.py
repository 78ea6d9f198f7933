"""Jobs from the store to the process pool and back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

import structlog

from api.store import JobRecord, JobStore
from api.worker import Outcome, solve, start_worker

_DIED = {
    "type": "urn:shardplan:worker-died",
    "title": "The worker process died",
    "status": 500,
    "detail": "The process that planned this ended without an answer, most likely for want of memory.",
    "what_to_do": "Ask again to try again.",
}
_TOO_LONG = {"type": "urn:shardplan:timeout", "title": "Planning took too long", "status": 500}


class JobRunner:
    """Plans the queued jobs of a store, ``workers`` at a time.

    Each worker is a thread that claims a job and hands it to a process of its own (spawned: no state of the server's
    leaks into a solve), so that a job that dies takes no other with it.
    """

    def __init__(
        self, store: JobStore, *, workers: int, timeout_s: float, job: Callable[[dict[str, Any]], Outcome] = solve
    ) -> None:
        self._store = store
        self._stopping = threading.Event()
        self._queued = threading.Semaphore(0)
        self._workers = [_Worker(store, self._stopping, self._queued, timeout_s, job) for _ in range(workers)]

    def start(self) -> None:
        """Start the workers; jobs that an earlier server left unfinished come first."""
        interrupted = self._store.put_back_interrupted()
        waiting = self._store.counts().get("queued", 0)
        structlog.get_logger().info("jobs found", interrupted=interrupted, waiting=waiting)
        for worker in self._workers:
            worker.start()
        if waiting:
            self._queued.release(waiting)

    def wake(self) -> None:
        """Say that a job was queued."""
        self._queued.release()

    def cancel(self, job_id: str) -> bool:
        """Cancel a job that waits or runs, ending its process; False where it does neither."""
        if not self._store.cancel(job_id):
            return False
        for worker in self._workers:
            worker.end(job_id)
        return True

    def stop(self) -> None:
        """End the workers; what they were at is queued again."""
        self._stopping.set()
        for worker in self._workers:
            worker.end()
        self._queued.release(len(self._workers))
        for worker in self._workers:
            worker.join()


class _Worker(threading.Thread):
    """A thread with one process, which is replaced when it dies."""

    def __init__(
        self,
        store: JobStore,
        stopping: threading.Event,
        queued: threading.Semaphore,
        timeout_s: float,
        job: Callable[[dict[str, Any]], Outcome],
    ) -> None:
        super().__init__(name="shardplan-worker", daemon=True)
        self._store = store
        self._stopping = stopping
        self._queued = queued
        self._timeout_s = timeout_s
        self._job = job
        self._lock = threading.Lock()  # guards the two below: what is running, and in which process
        self._pid: int | None = None
        self._job_id: str | None = None

    def run(self) -> None:
        while not self._stopping.is_set():
            with ProcessPoolExecutor(
                max_workers=1, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker
            ) as pool:
                try:
                    self._serve(pool)
                except BrokenProcessPool:
                    # Not at once: a process that dies as it starts would be started for ever at full speed.
                    self._stopping.wait(1.0)
                finally:
                    with self._lock:
                        self._pid = None

    def end(self, job_id: str | None = None) -> None:
        """End the process, with whatever it is at, or only if it is at ``job_id``."""
        with self._lock:
            if self._pid is not None and job_id in (None, self._job_id):
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
                self._pid = None

    def _serve(self, pool: ProcessPoolExecutor) -> None:
        """Plan one job after the other.

        Raises:
            BrokenProcessPool: the process ended; the job that it was at is dealt with.
        """
        pid = pool.submit(os.getpid).result()
        with self._lock:
            self._pid = pid
        while True:
            self._queued.acquire()
            if self._stopping.is_set():
                return
            job = self._store.claim()
            if job is not None:
                self._plan(pool, job)

    def _plan(self, pool: ProcessPoolExecutor, job: JobRecord) -> None:
        log = structlog.get_logger().bind(job=job.id)
        log.info("job started")
        with self._lock:
            self._job_id = job.id
        try:
            outcome = pool.submit(self._job, job.request).result(timeout=self._timeout_s)
        except TimeoutError:
            self._store.fail(job.id, {**_TOO_LONG, "detail": f"It was ended after {self._timeout_s:.0f} s."})
            log.warning("job timed out")
            self.end(job.id)
            raise BrokenProcessPool from None
        except BrokenProcessPool:
            if self._stopping.is_set():
                self._store.put_back(job.id)
            else:
                self._store.fail(job.id, _DIED)
            log.warning("worker process ended", stopping=self._stopping.is_set())
            raise
        finally:
            with self._lock:
                self._job_id = None
        if "plan" in outcome:
            self._store.succeed(job.id, outcome["plan"])
        else:
            self._store.fail(job.id, outcome["error"])
        log.info("job finished", outcome=next(iter(outcome)))
