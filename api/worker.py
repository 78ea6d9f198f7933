"""What runs in a worker process: one request in, a plan or an error out, all as plain JSON values."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait
from typing import Any

import structlog

from api.errors import UserError, problem_of
from api.logs import configure_logs
from api.planning import plan_request
from api.schemas import PlanRequest

Outcome = dict[str, Any]
"""``{"plan": {...}}`` or ``{"error": {...}}``."""


def start_worker() -> None:
    """Prepare a fresh worker process: it ends with its server, however that ends, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logs()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def solve(request: dict[str, Any]) -> Outcome:
    """Return the outcome of a request that a client sent."""
    try:
        plan = plan_request(PlanRequest.model_validate(request), allow_local=False)
        return {"plan": plan.to_dict()}
    except UserError as error:
        return {"error": problem_of(error)}
    except Exception as error:  # noqa: BLE001
        # The boundary of the process: whatever it was is recorded with the job, and the worker lives on.
        structlog.get_logger().exception("job failed", model=str(request.get("model"))[:100])
        return {"error": problem_of(error)}


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
