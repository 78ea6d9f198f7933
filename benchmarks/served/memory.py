"""Resident memory of a server and its processes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def memory_mb(pid: int) -> tuple[float, float]:
    """Return the resident memory of a process, and that of all processes below it, in MB."""
    resident, children = 0.0, []
    with suppress(OSError):  # it may have ended meanwhile
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        children = [
            int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
        ]
    return resident, sum(sum(memory_mb(child)) for child in children)
