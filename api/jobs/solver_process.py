"""The parent's handle of a solver process: starts it, sends requests, reads messages, kills it."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any, cast

from api.jobs.solver_main import NICENESS, SOLVE, Solve, serve_requests

_PAGE = os.sysconf("SC_PAGE_SIZE")
_POLL_S, _POLLS = 0.001, 1000


class ProcessDiedError(Exception):
    """The solver process ended without an answer."""


_context = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """Let all solver processes be forked from one that has imported ``modules`` and what planning needs.

    They then start within milliseconds and share its memory. Without effect once a process was started.
    """
    _context.set_forkserver_preload([SOLVE.partition(":")[0], *modules])


class SolverProcess:
    """One solver process, replaced after it died. No state of the server leaks into a solve: it is no fork of it."""

    def __init__(self, solve: Solve | str, memory_bytes: int, *, niceness: int = NICENESS) -> None:
        self._solve = solve
        self._memory_bytes = memory_bytes
        self._niceness = niceness
        self._process: multiprocessing.process.BaseProcess | None = None

    @property
    def is_alive(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        """Start the process, unless it is alive.

        Raises:
            OSError: the machine cannot start a process.
        """
        if self.is_alive:
            return
        self.end()
        self._pipe, worker_pipe = _context.Pipe()
        arguments = (worker_pipe, self._solve, self._memory_bytes, self._niceness)
        process = _context.Process(target=serve_requests, args=arguments, daemon=True)
        process.start()
        self._process = process
        worker_pipe.close()

    def ask(self, request_json: str, time_limit_s: float) -> None:
        """Send a request, whose search may take ``time_limit_s`` seconds.

        Raises:
            ProcessDiedError: the process has ended.
        """
        try:
            self._pipe.send_bytes(f'{{"time_limit_s": {time_limit_s!r}, "request": {request_json}}}'.encode())
        except OSError as error:
            raise ProcessDiedError from error

    def next_message(self, timeout_s: float) -> dict[str, Any] | None:
        """Return ``{"event": ...}`` or ``{"outcome": ...}``, or None where none arrives in ``timeout_s`` seconds.

        Raises:
            ProcessDiedError: the process has ended.
        """
        try:
            if not self._pipe.poll(timeout_s):
                return None
            return cast(dict[str, Any], json.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError) as error:
            raise ProcessDiedError from error

    @property
    def resident_bytes(self) -> int:
        """Resident bytes of the process; 0 where it has ended."""
        pid = None if self._process is None else self._process.pid
        try:
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            return 0

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.join()
        # Another thread that starts a process reaps all ended children, perhaps this one too. Until that thread has
        # noted the end, `is_alive` is still True.
        for _ in range(_POLLS):
            if not process.is_alive():
                process.close()
                break
            time.sleep(_POLL_S)
        self._pipe.close()
