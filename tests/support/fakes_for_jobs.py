"""Stand-ins for planning that solver processes can import; what each does is in its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from api.jobs.solver_main import Report


def answer(request: dict[str, Any], report: Report, time_limit_s: float) -> dict[str, Any]:
    return {"plan": {"for": request["model"] * request.get("times", 1)}}


def refuse(request: dict[str, Any], report: Report, time_limit_s: float) -> dict[str, Any]:
    return {"error": {"title": "no", "status": 422, "detail": request["model"]}}


def die(request: dict[str, Any], report: Report, time_limit_s: float) -> dict[str, Any]:
    os._exit(9)


def die_once(request: dict[str, Any], report: Report, time_limit_s: float) -> dict[str, Any]:
    mark = Path(request["mark"])
    if mark.exists():
        return answer(request, report, time_limit_s)
    mark.touch()
    os._exit(9)


def block(request: dict[str, Any], report: Report, time_limit_s: float) -> dict[str, Any]:
    """Report, say so in a pipe, then wait for ever in another."""
    report({"stage": "blocking"})
    Path(request["started"]).write_text("started")
    Path(request["released"]).read_text()
    return answer(request, report, time_limit_s)


def swallow_memory(request: dict[str, Any], report: Report, time_limit_s: float) -> dict[str, Any]:
    """Take 10 MB after 10 MB, and touch all of it."""
    held = []
    while True:
        held.append(b"x" * 10_000_000)


def note_and_answer(request: dict[str, Any], report: Report, time_limit_s: float) -> dict[str, Any]:
    """Add a line to a file: how often the job ran."""
    with Path(request["ran"]).open("a") as file:
        file.write(f"{request['model']}\n")
    return answer(request, report, time_limit_s)


def answer_in_time(request: dict[str, Any], report: Report, time_limit_s: float) -> dict[str, Any]:
    """Answer with the time that it was given."""
    return {"plan": {"time_limit_s": time_limit_s}}


def block_where_asked(request: dict[str, Any], report: Report, time_limit_s: float) -> dict[str, Any]:
    """Block as `block` does where the request names pipes."""
    return (block if "started" in request else answer)(request, report, time_limit_s)
