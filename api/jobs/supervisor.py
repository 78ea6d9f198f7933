"""Supervision of a claimed job: runs it in a solver process, enforces the limits, records events and outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from api.jobs.database import UNREACHABLE
from api.jobs.metrics import Metrics
from api.jobs.solver_main import OUT_OF_MEMORY, Outcome
from api.jobs.solver_process import ProcessDiedError, SolverProcess
from api.jobs.store import JobRecord, JobStore
from planner.progress import SEARCH_STAGES

_POLL_S = 0.1
_DATABASE_EVERY_S = 0.5
"""Seconds between queries of whether the job was cancelled, and between writes of its progress."""

_LONGEST_PAUSE_S = 5.0
_TIMEOUT = {
    "type": "urn:shardplan:timeout",
    "title": "Planning took too long",
    "status": 500,
    "what_to_do": "Give a mesh, a number of micro-batches or a checkpointing mode, so that there is less to search.",
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveLimits:
    """Limits of one solve.

    Attributes:
        time_s: seconds for the search, which then returns its incumbent; also the seconds for all steps before it.
        grace_s: further seconds until the process is killed.
        memory_bytes: resident bytes above which the process is killed.
        lease_s: seconds that a claim is valid without renewal.
    """

    time_s: float
    memory_bytes: int
    grace_s: float = 30.0
    lease_s: float = 15.0


class Supervisor:
    """The supervisor of one solver process, which runs one claimed job at a time. It belongs to one thread."""

    def __init__(
        self,
        store: JobStore,
        process: SolverProcess,
        limits: SolveLimits,
        stopping: threading.Event,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._process = process
        self._limits = limits
        self._stopping = stopping
        self._metrics = metrics

    def run(self, job: JobRecord) -> None:
        """Run a claimed job to its end; requeue it if the service stops meanwhile, or if no process can be started."""
        log = structlog.get_logger().bind(job=job.id, attempt=job.attempt)
        log.info("job started")
        started = time.monotonic()
        try:
            self._process.start()
        except OSError as error:  # the machine has no memory or no processes left: not the job's fault
            log.warning("no solver process", error=str(error))
            self._persist(lambda: self._store.release(job))
            self._stopping.wait(_LONGEST_PAUSE_S)
            return
        try:
            self._process.ask(job.request_json, self._limits.time_s)
            outcome = self._watch(job)
        except ProcessDiedError:
            self._process.end()
            self._persist(lambda: self._store.lose(job))
            log.warning("solver process died")
            self._metrics.solved("died", time.monotonic() - started)
            return
        if outcome is None:
            log.info("job left", stopping=self._stopping.is_set())
            return
        what = self._write(job, outcome)
        self._metrics.solved(what, time.monotonic() - started)
        log.info("job finished", outcome=what, seconds=round(time.monotonic() - started, 3))
        if self._process.resident_bytes > self._limits.memory_bytes // 2:
            self._process.end()  # the next job gets a new process, with all of the memory

    def _watch(self, job: JobRecord) -> Outcome | None:
        """Return the outcome of the process, or the error of an exceeded limit.

        None where the job was cancelled or taken over, or where the service stops, which requeues the job.

        Raises:
            ProcessDiedError: the process ended without an outcome.
        """
        events: list[dict[str, Any]] = []
        searching = False
        since = last_check = renewed = time.monotonic()
        while True:
            message = self._process.next_message(_POLL_S)
            if message is not None and "outcome" in message:
                if events:
                    self._try_to_renew(job, events)
                outcome: Outcome = message["outcome"]
                return outcome
            if message is not None:
                events.append(message["event"])
                if not searching and message["event"]["stage"] in SEARCH_STAGES:
                    searching, since = True, time.monotonic()  # the search's own limit starts here too
            excess = self._excess(since)
            if excess is not None:
                self._process.end()
                return {"error": excess}
            if self._stopping.is_set():
                self._process.end()
                self._persist(lambda: self._store.release(job))
                return None
            now = time.monotonic()
            if now - last_check < _DATABASE_EVERY_S:
                continue
            last_check = now
            if events or now - renewed > self._limits.lease_s / 3:
                is_claimed = self._try_to_renew(job, events)
                renewed = now
                events = []
            else:
                is_claimed = self._try(lambda: self._store.is_claimed(job)) is not False
            if not is_claimed:
                self._process.end()
                return None

    def _excess(self, since: float) -> dict[str, Any] | None:
        """Return the problem details of an exceeded limit, or None; time counts from ``since`` (``time.monotonic``)."""
        used = self._process.resident_bytes
        if used > self._limits.memory_bytes:
            most = self._limits.memory_bytes
            detail = f"It was ended at {used / 1e9:.2f} GB; a solve has at most {most / 1e9:.2f} GB."
            return {**OUT_OF_MEMORY, "detail": detail, "memory_bytes": used, "limit_bytes": most}
        most_s = self._limits.time_s + self._limits.grace_s
        if time.monotonic() - since > most_s:
            return {**_TIMEOUT, "detail": f"It was ended after {most_s:g} s, without a plan."}
        return None

    def _write(self, job: JobRecord, outcome: Outcome) -> str:
        if "error" in outcome:
            is_recorded = self._persist(lambda: self._store.fail(job, outcome["error"]))
            return "failed" if is_recorded else "too late"
        (result,) = outcome.values()
        is_recorded = self._persist(lambda: self._store.succeed(job, result))
        if "plan" in outcome:
            self._metrics.planned(str((result.get("solver") or {}).get("status")))
        return "succeeded" if is_recorded else "too late"

    def _try_to_renew(self, job: JobRecord, events: list[dict[str, Any]]) -> bool:
        # An unreachable database may lose events, but the job stays claimed until the database says otherwise.
        return self._try(lambda: self._store.renew(job, self._limits.lease_s, events)) is not False

    def _try(self, action: Callable[[], _T]) -> _T | None:
        try:
            return action()
        except UNREACHABLE as error:
            structlog.get_logger().warning("database unreachable", error=type(error).__name__)
            return None

    def _persist(self, action: Callable[[], _T]) -> _T | None:
        """Repeat a write until it succeeds: a full disk or an unreachable database may recover.

        It gives up where the service stops; the unfinished job is then run again.
        """
        pause_s = 0.2
        while True:
            try:
                return action()
            except UNREACHABLE as error:
                structlog.get_logger().warning("cannot write to the database", error=type(error).__name__)
            if self._stopping.wait(pause_s):
                return self._try(action)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
