"""`WorkPool`: two processes do all that requests have parsed or computed, one of them small requests only.

A traced graph of 50,000 ops takes seconds to check. In the server, under Python's one lock, a few dozen of them would
keep reads and probes waiting, and their memory would stay.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi import HTTPException, Request

from api.http.problems import ProblemError
from api.jobs.solver_main import Outcome, Solve
from api.jobs.solver_process import ProcessDiedError, SolverProcess

FUNCTION = "api.http.work.functions:answer"
"""The name of the function of the processes."""

_POLL_S = 0.05
_START_S, _PAUSE_S = 300.0, 1.0
"""Seconds in which a process has imported torch, on the busiest machine, and between two tries to start one."""

_MEMORY_BYTES = 4_000_000_000
"""Resident bytes above which a process is ended; the largest body takes a fifth of it."""

_GROWTH_BYTES = 100_000_000
"""Bytes by which a process may have grown when nothing waits for it; then a new one takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimits:
    """Limits of one process.

    Attributes:
        waiting: most requests that wait for it; further ones are refused.
        waiting_of_owner: most of them of one owner.
        time_s: seconds of one request, after which the process is ended.
        niceness: of the process.
    """

    waiting: int
    waiting_of_owner: int
    time_s: float
    niceness: int


SMALL_BYTES = 50_000
"""Bytes of text to be read up to which a request is small; a model's config has a few thousand."""

SMALL = WorkLimits(waiting=256, waiting_of_owner=64, time_s=20.0, niceness=0)
LARGE = WorkLimits(waiting=32, waiting_of_owner=8, time_s=60.0, niceness=10)


class WorkPool:
    """The processes; `run` is called on the event loop only."""

    def __init__(
        self, function: Solve | str = FUNCTION, *, small: WorkLimits = SMALL, large: WorkLimits = LARGE
    ) -> None:
        self._small, self._large = _WorkProcess(function, small), _WorkProcess(function, large)

    def start(self) -> None:
        """Start the processes, without waiting for them."""
        self._small.start()
        self._large.start()

    def stop(self) -> None:
        """End the processes; what they do is lost."""
        self._small.stop()
        self._large.stop()

    @property
    def is_ready(self) -> bool:
        """Whether both processes have been started, so that none keeps its first request waiting."""
        return self._small.is_ready and self._large.is_ready

    async def run(self, request: Request, owner: str, function: str, nbytes: int, **arguments: Any) -> Any:
        """Return what ``function`` of `functions` returns, once it is the owner's turn.

        Args:
            request: the client's; if the client has gone before the turn, nothing is done.
            owner: whose turn it is; owners take turns.
            function: name of the function.
            nbytes: bytes of text that it reads.
            **arguments: of the function, as JSON data.

        Raises:
            HTTPException: 503 where too many wait, or the client has gone.
            ProblemError: what the function refused.
        """
        process = self._small if nbytes <= SMALL_BYTES else self._large
        async with process.turn(owner):
            if await request.is_disconnected():
                raise HTTPException(503, "The client has gone.")
            loop = asyncio.get_running_loop()
            outcome = await loop.run_in_executor(process.thread, process.answer, function, arguments)
        if "error" in outcome:
            raise ProblemError(outcome["error"])
        return outcome["result"]


class _WorkProcess:
    """One process, its thread, and those who wait for it."""

    def __init__(self, function: Solve | str, limits: WorkLimits) -> None:
        self._process = SolverProcess(function, _MEMORY_BYTES, niceness=limits.niceness)
        self._limits = limits
        self._busy = self._stopped = False
        self.is_ready = False
        self._least_bytes = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="shardplan-work")

    def start(self) -> None:
        self.thread.submit(self._start_at_last)

    def stop(self) -> None:
        self._stopped = True  # the thread reads it every `_POLL_S`
        self.thread.shutdown(cancel_futures=True)
        self._process.end()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait until nobody else has the process, in turns of owners."""
        if self._busy:
            await self._wait(owner)
        self._busy = True
        try:
            yield
        finally:
            self._pass_on()

    def answer(self, function: str, arguments: dict[str, Any]) -> Outcome:
        """Return the outcome of the function, or the error of an exceeded limit."""
        try:
            self._start()
            self._process.ask(json.dumps({"function": function, "arguments": arguments}), self._limits.time_s)
            outcome = self._watch(self._limits.time_s)
        except (ProcessDiedError, OSError) as error:
            structlog.get_logger().warning("work process died", error=repr(error))
            outcome = None
        if outcome is None:
            self._process.end()
            return {"error": _DIED}
        if not self._waiting and self._process.resident_bytes > self._least_bytes + _GROWTH_BYTES:
            self._process.end()  # the next request starts another, within milliseconds
        return outcome

    def _start_at_last(self) -> None:
        """Start the process, again and again until it is there: the server is not ready before."""
        while not self._stopped:
            try:
                self._start()
                return
            except (ProcessDiedError, OSError) as error:
                structlog.get_logger().warning("no work process", error=repr(error))
                self._process.end()
                time.sleep(_PAUSE_S)

    def _start(self) -> None:
        """Start the process, unless it is alive, and note what it holds before it has done anything.

        Raises:
            ProcessDiedError: the process ended before it was ready. `OSError`: the machine cannot start one.
        """
        if self._stopped or self._process.is_alive:
            return
        self._process.start()
        self._process.ask('{"function": "ready", "arguments": {}}', _START_S)
        if "error" in (self._watch(_START_S) or {}):
            raise ProcessDiedError
        self._least_bytes = self._process.resident_bytes
        self.is_ready = True

    def _watch(self, time_s: float) -> Outcome | None:
        """Return the outcome of the process, or the error of an exceeded limit; None where the service stops.

        Raises:
            ProcessDiedError: the process has ended.
        """
        until = time.monotonic() + time_s
        while not self._stopped:
            message = self._process.next_message(_POLL_S)
            if message is not None:
                outcome: Outcome = message["outcome"]
                return outcome
            if time.monotonic() > until or self._process.resident_bytes > _MEMORY_BYTES:
                self._process.end()
                return {"error": _TOO_LARGE}
        return None

    async def _wait(self, owner: str) -> None:
        own = self._waiting.get(owner, deque())
        if len(own) >= self._limits.waiting_of_owner or sum(map(len, self._waiting.values())) >= self._limits.waiting:
            raise HTTPException(503, "Too many requests wait to be checked.")
        own.append(asyncio.get_running_loop().create_future())
        turn = own[-1]
        self._waiting[owner] = own
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the process to the next owner's first request, or to nobody."""
        self._busy = False
        while self._waiting:
            owner, own = next(iter(self._waiting.items()))
            turn = own.popleft()
            self._waiting.move_to_end(owner)
            if not own:
                del self._waiting[owner]
            if not turn.cancelled():
                self._busy = True
                turn.set_result(None)
                return


_TOO_LARGE = {
    "type": "urn:shardplan:too-large",
    "title": "The request takes too long to read",
    "status": 422,
    "detail": "Reading it took more time or memory than a request has.",
    "what_to_do": "Send less at once: a smaller graph, or a plan by the id of its job.",
}
_DIED = {
    "type": "urn:shardplan:work-process-died",
    "title": "Busy",
    "status": 503,
    "detail": "The process that read this request ended without an answer.",
}
