"""Stand-ins for the functions of a work process; what each does is in its name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from api.jobs.solver_main import Report

_held: list[bytes] = []


def answer(request: dict[str, Any], report: Report, time_limit_s: float) -> dict[str, Any]:
    name, value = request["function"], request["arguments"].get("value")
    if name == "block":
        Path(value).read_text()
    elif name == "note":
        with Path(value).open("a") as file:
            file.write("noted\n")
    elif name == "die":
        os._exit(9)
    elif name == "refuse":
        return {"error": {"title": "no", "status": 422, "detail": value}}
    elif name == "grow":
        _held.append(b"x" * 200_000_000)
    elif name == "sleep":
        time.sleep(value)
    return {"result": {"value": value, "pid": os.getpid()}}
