"""`colours`: the page's colours, which ``api/static/css/page.css`` defines, for figures and notebooks."""

from __future__ import annotations

import re
from functools import cache

from api.view.static_files import read

_VARIABLE = re.compile(r"^\s*--([\w-]+):\s*(?:light-dark\()?(#[0-9a-f]{6})", re.MULTILINE)


@cache
def colours() -> dict[str, str]:
    """Return name -> colour in the light theme, such as "axis-tp" -> "#d55e00"."""
    return dict(_VARIABLE.findall(read("css/page.css")))


def colour(kind: str, name: str) -> str:
    """Return the colour of a name of a kind: "axis", "memory" or "time"; grey for a name that has none."""
    return colours().get(f"{kind}-{name}", colours()["time-other"])


_PARTS = {"exposed communication": "exposed", "bubble": "idle"}


def part_colour(name: str) -> str:
    """Return the colour of a part of a step's time, as `plan_view` names it."""
    return colour("time", _PARTS.get(name, name))
