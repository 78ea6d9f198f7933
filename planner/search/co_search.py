"""Searches that go on side by side: whichever has the lowest bound goes next, and what one finds the others beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from planner.search.task_pool import Pool


class Walk(Protocol):
    """A search that is asked for one task after the other."""

    @property
    def next_s(self) -> float:
        """The lowest bound of what it could look at next; infinite where nothing is left that is wanted."""

    @property
    def wanted_s(self) -> float:
        """The step time from which on a plan is not wanted."""

    def want_less(self, time_s: float) -> None:
        """From now on want no plan that takes ``time_s`` or more."""

    def pick(self) -> tuple[Any, Callable[[Any], Any]] | None:
        """Return what goes next and the task for it; None where there is none as long as nothing more is found."""

    def done(self, item: Any, task: Any, found: Any) -> None:
        """Note what came of a task."""


def walk_together(pool: Pool, walks: Sequence[Walk]) -> None:
    """Do the tasks of all ``walks`` until none has any."""

    def tell() -> None:
        wanted_s = min(walk.wanted_s for walk in walks)
        for walk in walks:
            walk.want_less(wanted_s)

    def pick() -> tuple[tuple[Walk, Any], Callable[[Any], Any]] | None:
        for walk in sorted(walks, key=lambda walk: walk.next_s):
            picked = walk.pick()
            if picked is not None:
                return (walk, picked[0]), picked[1]
        return None

    def done(whose: tuple[Walk, Any], task: Any, found: Any) -> None:
        walk, item = whose
        walk.done(item, task, found)
        tell()

    tell()
    pool.run(pick, done)
