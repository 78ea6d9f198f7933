"""What the tasks of a search share in one process: the planner of runs, and what is made from it once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cost_model.layouts.layout import MeshSpec
from planner.run.baselines import Restriction
from planner.run.run_planner import RunPlanner
from planner.run.stage_clock import Clock

T = TypeVar("T")
Restrict = Callable[[MeshSpec], Restriction | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConstraints:
    """What every plan of a search has to keep.

    Attributes:
        memory_bytes: cap on the peak per device.
        restrict: mesh -> what a baseline and pins leave to choose on it; None: everything.
    """

    memory_bytes: int
    restrict: Restrict


@dataclass(slots=True)
class WorkerContext:
    """A planner of runs, and what tasks made from it. A copy in another process starts with the planner alone."""

    planner: RunPlanner
    _products: dict[Callable[[RunPlanner], Any], Any] = field(default_factory=dict)

    @property
    def clock(self) -> Clock:
        """The planner's clock."""
        return self.planner.clock

    def once(self, make: Callable[[RunPlanner], T]) -> T:
        """Return ``make(planner)``, made at the first call and the same object from then on."""
        if make not in self._products:
            self._products[make] = make(self.planner)
        product: T = self._products[make]
        return product

    def __getstate__(self) -> RunPlanner:
        return self.planner

    def __setstate__(self, planner: RunPlanner) -> None:
        self.planner, self._products = planner, {}
