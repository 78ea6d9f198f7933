"""What the tasks of an outer search work on, in this process or in a worker: a search, and the stages of its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cost_model.layouts.layout import MeshSpec
from planner.run.baselines import Restriction
from planner.run.run_planner import RunPlanner
from planner.run.stage_clock import Clock
from planner.search.pipeline.stage_planners import StagePlanners, stage_clusters_of

Restrict = Callable[[MeshSpec], Restriction | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConstraints:
    """What differs between the plans that one session makes.

    Attributes:
        memory_bytes: the cap on the peak per device.
        restrict: what a planner and pins leave to choose on a mesh.
    """

    memory_bytes: int
    restrict: Restrict


@dataclass(slots=True)
class WorkerContext:
    """A search under some terms, and what is remembered of it."""

    search: RunPlanner
    _terms: SearchConstraints | None = None
    _stages: StagePlanners | None = field(default=None)

    @property
    def clock(self) -> Clock:
        """The search's."""
        return self.search.clock

    @property
    def restrict(self) -> Restrict:
        """What is left to choose on a mesh."""
        assert self._terms is not None
        return self._terms.restrict

    @property
    def stages(self) -> StagePlanners:
        """What plans the stages of pipelines."""
        if self._stages is None:
            self._stages = StagePlanners(self.search, self.restrict, stage_clusters_of(self.search))
        return self._stages

    def take(self, terms: SearchConstraints) -> None:
        """Get ready for tasks under ``terms``."""
        self.search.memory_bytes = terms.memory_bytes
        if self._stages is not None:
            self._stages.under(terms.memory_bytes, terms.restrict)
        self._terms = terms

    def __getstate__(self) -> RunPlanner:
        return self.search

    def __setstate__(self, search: RunPlanner) -> None:
        self.search, self._terms, self._stages = search, None, None
