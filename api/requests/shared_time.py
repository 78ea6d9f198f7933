"""`SharedTimeSession`: a planning session whose searches have one time limit together."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from cost_model.layouts.layout import MeshSpec
from planner.errors import SolverError
from planner.plan.sharding_plan import ShardingPlan
from planner.session import PlanningSession


class SharedTimeSession(PlanningSession):
    """A session whose time limit is for all of its searches together. The time starts when the model is traced."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        limit_s = self.spec.time_limit_s
        self._ends_at = None if limit_s is None else time.perf_counter() + limit_s

    def plan(self, **options: Any) -> ShardingPlan:
        """Return the plan of `PlanningSession.plan`, searched in the time that is left.

        Raises:
            SolverError: no time is left.
        """
        self._limit_search()
        return super().plan(**options)

    def plan_if_any(self, **options: Any) -> ShardingPlan | None:
        """Return the plan of `PlanningSession.plan_if_any`, searched in the time that is left.

        Raises:
            SolverError: no time is left.
        """
        self._limit_search()
        return super().plan_if_any(**options)

    def least_memory_bytes(self, *, mesh: str | MeshSpec | None = None) -> int | None:
        """Return the least peak memory per device of any plan, in bytes; None where no time is left to search for it.

        The search itself has no time limit.
        """
        return None if self._left_s() == 0 else super().least_memory_bytes(mesh=mesh)

    def _limit_search(self) -> None:
        left_s = self._left_s()
        if left_s == 0:
            raise SolverError("time was up before any plan was found.", what_to_do="Allow a longer search.")
        self.spec = dataclasses.replace(self.spec, time_limit_s=left_s)

    def _left_s(self) -> float | None:
        """Return the seconds that are left, at least 0; None: there is no limit."""
        return None if self._ends_at is None else max(self._ends_at - time.perf_counter(), 0.0)
