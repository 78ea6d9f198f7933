"""Stand-ins for planning that worker processes can import; what each does is in its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    return {"plan": {"for": request["model"]}}


def refuse(request: dict[str, Any]) -> dict[str, Any]:
    return {"error": {"title": "no", "status": 422, "detail": request["model"]}}


def die(request: dict[str, Any]) -> dict[str, Any]:
    os._exit(9)


def die_once(request: dict[str, Any]) -> dict[str, Any]:
    mark = Path(request["mark"])
    if mark.exists():
        return answer(request)
    mark.touch()
    os._exit(9)


def block(request: dict[str, Any]) -> dict[str, Any]:
    """Say so in a pipe, then wait for ever in another."""
    Path(request["started"]).write_text("started")
    Path(request["released"]).read_text()
    return answer(request)
