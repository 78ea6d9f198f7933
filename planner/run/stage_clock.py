"""Seconds spent in each stage of planning: tracing, costs, solving, checking, writing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """The seconds spent in each stage.

    Attributes:
        spent: stage -> seconds spent in it so far.
    """

    spent: dict[str, float] = field(default_factory=dict)

    def add(self, spent: Mapping[str, float]) -> None:
        """Add seconds that were spent in another process."""
        for name, seconds in spent.items():
            self.spent[name] = self.spent.get(name, 0.0) + seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - started


def left_s(deadline: float | None) -> float | None:
    """Return the seconds until ``deadline``, a time of `time.perf_counter`; at least 0. None without a deadline."""
    return None if deadline is None else max(deadline - time.perf_counter(), 0.0)
