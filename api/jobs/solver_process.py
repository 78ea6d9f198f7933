"""A process that solves, seen from its parent: started warm, asked, watched, ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any, cast

from api.jobs.solver_main import Solve, serve_requests

_PAGE = os.sysconf("SC_PAGE_SIZE")
_POLL_S, _POLLS = 0.001, 1000


class ProcessDiedError(Exception):
    """The process ended without an answer."""


class SolverProcess:
    """One process at a time, spawned (no state of the server's leaks into a solve), replaced when it has died."""

    def __init__(self, solve: Solve, memory_bytes: int) -> None:
        self._solve = solve
        self._memory_bytes = memory_bytes
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> None:
        """Start a process where there is none that lives.

        Raises:
            OSError: the machine has none to give.
        """
        if self._process is not None and self._process.is_alive():
            return
        self.end()
        context = multiprocessing.get_context("spawn")
        self._pipe, worker_pipe = context.Pipe()
        arguments = (worker_pipe, self._solve, self._memory_bytes)
        process = context.Process(target=serve_requests, args=arguments, daemon=True)
        process.start()
        self._process = process
        worker_pipe.close()

    def ask(self, request_json: str, time_limit_s: float) -> None:
        """Send a request, whose search may take so long.

        Raises:
            ProcessDiedError: the process has ended.
        """
        try:
            self._pipe.send_bytes(f'{{"time_limit_s": {time_limit_s!r}, "request": {request_json}}}'.encode())
        except OSError as error:
            raise ProcessDiedError from error

    def next_message(self, timeout_s: float) -> dict[str, Any] | None:
        """Return ``{"event": ...}`` or ``{"outcome": ...}``, or None where nothing comes in that time.

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
        """The memory that the process has in use, 0 where it has ended."""
        pid = None if self._process is None else self._process.pid
        try:
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            return 0

    def end(self) -> None:
        """End the process at once, whatever it is at."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.join()
        # A thread that starts a process reaps all children, and may have reaped this one first:
        # then it is over before it is known here to be.
        for _ in range(_POLLS):
            if not process.is_alive():
                process.close()
                break
            time.sleep(_POLL_S)
        self._pipe.close()
