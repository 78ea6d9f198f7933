"""What runs in a solver process: requests in, progress and plans or errors out, one by one, all as JSON text.

It imports nothing heavy: the solve function is an argument (`solve`), and imports what it needs at start.
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
from multiprocessing.connection import Connection, wait
from typing import Any

from api.jobs.logs import configure_logs

Outcome = dict[str, Any]
"""``{"plan": {...}}`` or ``{"error": {...}}``."""

Report = Callable[[dict[str, Any]], None]
"""Called with each event of a solve, a JSON object with a ``stage``."""

Solve = Callable[[dict[str, Any], Report, float], Outcome]
"""From a request, and the seconds that its search may take, to its outcome."""

OUT_OF_MEMORY = {
    "type": "urn:shardplan:memory-limit",
    "title": "Planning took too much memory",
    "status": 500,
    "what_to_do": "Give a mesh, a number of micro-batches or a checkpointing mode, so that there is less to search; "
    "or let the server's job_memory_bytes be larger.",
}

_NICENESS = 10
"""Solves give way to the server, which answers in milliseconds, where both are on one machine."""

_HEADROOM = 2**30
"""Bytes over the limit at which the process itself is refused more; its supervisor ends it before, and can say why."""


def serve_requests(pipe: Connection, solve: Solve, memory_bytes: int) -> None:
    """Answer the requests that come through ``pipe`` until it is closed: the whole life of a solver process."""
    _settle(memory_bytes)
    while True:
        try:
            message = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        outcome = solve(message["request"], lambda event: _send(pipe, {"event": event}), message["time_limit_s"])
        _send(pipe, {"outcome": outcome})


def _settle(memory_bytes: int) -> None:
    """Prepare a fresh process: it ends with its parent, however that ends, and leaves to it what stops the service."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, by Ctrl-C or by systemd
        signal.signal(number, signal.SIG_IGN)
    configure_logs()
    os.nice(_NICENESS)
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
