"""The main loop of a solver process: it takes requests one by one, and sends progress and outcomes, as JSON text.

This module imports nothing heavy. The solve function is an argument, given by its name (`SOLVE`): loading it, when the
process starts, imports torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from api.jobs.logs import configure_logs

Outcome = dict[str, Any]
"""``{"plan": {...}}``, ``{"result": ...}`` of another kind of job, or ``{"error": {...}}``."""

Report = Callable[[dict[str, Any]], None]
"""Called with each event of a solve, a JSON object with a ``stage``."""

Solve = Callable[[dict[str, Any], Report, float], Outcome]
"""Function of a request, a `Report` and the seconds for the search; returns the outcome."""

SOLVE = "api.jobs.solve:solve"
"""The name of the function that plans."""

OUT_OF_MEMORY = {
    "type": "urn:shardplan:memory-limit",
    "title": "Planning took too much memory",
    "status": 500,
    "what_to_do": "Give a mesh, a number of micro-batches or a checkpointing mode, so that there is less to search; "
    "or let the server's job_memory_bytes be larger.",
}

NICENESS = 10
"""Niceness of solver processes, so that a server on the same machine still answers in milliseconds."""

_HEADROOM = 2**30
"""Bytes above the limit at which allocations fail. Usually the supervisor kills the process before, with a reason."""


def serve_requests(pipe: Connection, solve: Solve | str, memory_bytes: int, niceness: int) -> None:
    """Answer the requests that arrive on ``pipe`` until it is closed; the main function of a solver process.

    Args:
        pipe: has requests, and takes messages.
        solve: the function that answers, or its name, ``module:function``.
        memory_bytes: resident bytes above which the process is ended.
        niceness: of the process; 0 runs like the server itself.
    """
    _settle(memory_bytes, niceness)
    if isinstance(solve, str):
        module, _, name = solve.partition(":")
        solve = cast(Solve, getattr(import_module(module), name))
    while True:
        try:
            message = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        outcome = solve(message["request"], lambda event: _send(pipe, {"event": event}), message["time_limit_s"])
        _send(pipe, {"outcome": outcome})


def _settle(memory_bytes: int, niceness: int) -> None:
    """Prepare a new process: ignore stop signals, set logs, niceness and memory limits, and exit with the parent."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and systemd send them to all processes; the parent acts
        signal.signal(number, signal.SIG_IGN)
    configure_logs()
    os.nice(niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = memory_bytes + _HEADROOM
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the parent is gone; this process ends as well
        pipe.send_bytes(json.dumps(message).encode())


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
