"""`WorkerContext`: the planner of runs and the objects built from it, which the tasks in one process share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cost_model.layouts.layout import MeshSpec
from planner.pricing.run_spec import Run
from planner.run.baselines import Restriction
from planner.run.run_planner import RunPlanner
from planner.run.stage_clock import Clock

T = TypeVar("T")
Restrict = Callable[[MeshSpec], Restriction | None]
RunKey = tuple[tuple[int, ...], int, str]
"""Sizes of the mesh's axes, number of micro-batches and checkpointing mode of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConstraints:
    """The constraints on every plan of a search.

    Attributes:
        memory_bytes: cap on the peak bytes per device.
        restrict: mesh -> the choices that a baseline and pins allow on it; None: all choices.
        excluded: runs that are left out: their plans were found not to run.
    """

    memory_bytes: int
    restrict: Restrict
    excluded: frozenset[RunKey] = frozenset()

    def allows(self, run: Run) -> bool:
        """Return whether ``run`` is not left out."""
        return (run.mesh.shape, run.micro_batches, run.ac) not in self.excluded


@dataclass(slots=True)
class WorkerContext:
    """A planner of runs, and the objects that tasks built from it. A copy in another process has the planner alone."""

    planner: RunPlanner
    _products: dict[Callable[[RunPlanner], Any], Any] = field(default_factory=dict)

    @property
    def clock(self) -> Clock:
        """The planner's clock."""
        return self.planner.clock

    def once(self, make: Callable[[RunPlanner], T]) -> T:
        """Return ``make(planner)``: built at the first call, and the same object at later calls."""
        if make not in self._products:
            self._products[make] = make(self.planner)
        product: T = self._products[make]
        return product

    def __getstate__(self) -> RunPlanner:
        return self.planner

    def __setstate__(self, planner: RunPlanner) -> None:
        self.planner, self._products = planner, {}
