"""The run and decision with the least peak memory, with a proved lower bound: a best-first search over runs.

A run's bound is first that of its parameters and optimizer states, then that in closed form
(`RunPlanner.least_memory_bytes`), then that of its linear relaxation, and last the bound that the solver proved. The
run with the lowest bound is next. With a deadline, the most promising run is solved first, so that a decision is known
if time runs out.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.layouts.layout import MeshSpec
from planner.errors import SolverError
from planner.formulation.decision import Decision, decision_from_assignment
from planner.ilp.relaxation import least_memory_bound
from planner.ilp.solve import least_memory
from planner.liveness.structure import Structure
from planner.pricing.run_spec import Run
from planner.regions.block_grouping import Grouping
from planner.run.run_planner import RunPlanner, without_mismatched
from planner.run.run_results import FormulatedRun
from planner.run.stage_clock import left_s
from planner.search.worker_context import Restrict

_FIRST_S = 5.0
"""Seconds that the solver gets, even past the deadline, as long as there is no decision."""

_SURE = 3
"""Runs that are solved, even past the deadline, as long as there is no decision."""

EXACT = 1e-4
"""Relative gap of an exact answer."""

NEAR = 0.01
"""Relative gap of a quick answer: solving to `EXACT` can take 20 times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The decision of a run that has the lowest peak memory: ``nbytes`` per device."""

    nbytes: float
    run: Run
    structure: Structure
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemoryResult:
    """The outcome of a search for the least memory.

    Attributes:
        least: the decision with the least memory that was found; None: none was found.
        bound_bytes: lower bound on the peak bytes per device of every decision; infinite if no run has a layout.
    """

    least: LeastMemory | None
    bound_bytes: float

    def is_within(self, gap: float) -> bool:
        """Return whether the bound proves that at most the fraction ``gap`` of the memory found could be spared."""
        return self.least is not None and self.bound_bytes >= self.least.nbytes * (1.0 - gap)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Runs whose bounds in closed form follow from one structure: bounded by their parameters and states alone."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relaxed:
    """A run that is relaxed and not solved, with its program."""

    run: Run
    formulated: FormulatedRun


class LeastMemorySearch:
    """One search over runs for the least memory."""

    def __init__(
        self, planner: RunPlanner, restrict: Restrict, *, gap: float = EXACT, deadline: float | None = None
    ) -> None:
        """Prepare a search.

        Args:
            planner: the planner of the runs.
            restrict: mesh -> the choices that are allowed on it.
            gap: relative gap at which the search ends, and to which each run is solved.
            deadline: time of `time.perf_counter` at which the search returns what it has; None: no deadline.
        """
        self._planner, self._restrict, self._gap, self._deadline = planner, restrict, gap, deadline
        self._best: LeastMemory | None = None
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, _Group | Run | _Relaxed]] = []
        self._tried = set[Run]()
        self._closed_bytes = math.inf
        """Lowest bound of the runs that were solved, or that the solver gave up."""

    def run(self, runs: Sequence[Run], enough_bytes: float | None = None) -> LeastMemoryResult:
        """Return the decision with the least memory over ``runs``, and a lower bound on all of them.

        Args:
            runs: the runs to compare.
            enough_bytes: bytes per device that are enough: the search ends at a decision within them, or once the bound
                is above them. None: it ends at the least memory.
        """
        groups: dict[tuple[Grouping, bool], list[Run]] = defaultdict(list)
        for run in runs:
            groups[run.grouping, self._planner.micro_batch(run) == 1].append(run)
        for group in groups.values():
            self._push(min(map(self._planner.least_static_bytes, group)), _Group(runs=tuple(group)))
        if self._deadline is not None:
            self._find_first(runs, enough_bytes)
        while self._heap and not self._is_over(enough_bytes):
            bound_bytes, _, item = heapq.heappop(self._heap)
            if isinstance(item, _Group):
                for run in item.runs:
                    self._push(max(self._planner.least_memory_bytes(run), bound_bytes), run)
            elif isinstance(item, _Relaxed):
                self._solve(item, bound_bytes)
            elif item not in self._tried:
                relaxed = self._relax(item, bound_bytes)
                if relaxed is not None:
                    self._push(*relaxed)
        return LeastMemoryResult(least=self._best, bound_bytes=self._bound_bytes)

    def _find_first(self, runs: Sequence[Run], enough_bytes: float | None) -> None:
        """Solve the most promising run. If it has no decision in time, solve others, those on one axis first."""
        promising = sorted(runs, key=_promise, reverse=True)
        first, others = promising[:1], sorted(promising[1:], key=lambda run: sum(n > 1 for n in run.mesh.shape) > 1)
        for number, run in enumerate(first + others):
            if self._best is not None or (number >= _SURE and self._is_over(enough_bytes)):
                return
            bound_bytes = self._planner.least_memory_bytes(run)
            if enough_bytes is not None and bound_bytes > enough_bytes:
                continue
            relaxed = self._relax(run, bound_bytes)
            if relaxed is not None:
                self._solve(relaxed[1], relaxed[0])

    def _push(self, bound_bytes: float, item: _Group | Run | _Relaxed) -> None:
        heapq.heappush(self._heap, (bound_bytes, next(self._numbers), item))

    @property
    def _bound_bytes(self) -> float:
        found = math.inf if self._best is None else self._best.nbytes
        return min(self._heap[0][0] if self._heap else math.inf, self._closed_bytes, found)

    @property
    def _left_s(self) -> float | None:
        seconds = left_s(self._deadline)
        return seconds if seconds is None or self._best is not None else max(seconds, _FIRST_S)

    def _is_over(self, enough_bytes: float | None) -> bool:
        if self._deadline is not None and left_s(self._deadline) == 0.0:
            return True
        if enough_bytes is not None and (
            self._heap[0][0] > enough_bytes or (self._best is not None and self._best.nbytes <= enough_bytes)
        ):
            return True
        return self._best is not None and self._heap[0][0] >= self._best.nbytes * (1.0 - self._gap)

    def _relax(self, run: Run, bound_bytes: float) -> tuple[float, _Relaxed] | None:
        """Return the bound of a run's relaxation in bytes, and its program; None where the run has no decision."""
        self._tried.add(run)
        formulated = self._planner.formulate(run, self._restrict(run.mesh))
        if formulated.formulation is None:
            return None
        try:
            relaxed_bytes = least_memory_bound(formulated.formulation.problem, time_limit_s=self._left_s)
        except SolverError:
            self._closed_bytes = min(self._closed_bytes, bound_bytes)
            return None
        if relaxed_bytes is None:
            return None
        return max(relaxed_bytes, bound_bytes), _Relaxed(run=run, formulated=formulated)

    def _solve(self, relaxed: _Relaxed, bound_bytes: float) -> None:
        """Solve a run for its least memory, among the decisions that DTensor can run."""
        formulator, structure, formulation = relaxed.formulated
        proved_bytes = math.inf
        while formulation is not None:
            try:
                solution = least_memory(formulation.problem, self._gap, time_limit_s=self._left_s)
            except SolverError:
                proved_bytes = bound_bytes
                break
            if solution is None:
                break
            proved_bytes = max(bound_bytes, solution.bound_bytes)
            if solution.assignment is None:
                break
            decision = decision_from_assignment(formulation, solution.assignment)
            mismatched = self._planner.mismatched_regions(relaxed.run, formulation, decision)
            if not mismatched:
                if self._best is None or solution.nbytes < self._best.nbytes:
                    self._best = LeastMemory(
                        nbytes=solution.nbytes, run=relaxed.run, structure=structure, decision=decision
                    )
                break
            formulation = without_mismatched(formulator, formulation, decision, mismatched)
            proved_bytes = bound_bytes if formulation is not None else math.inf
        self._closed_bytes = min(self._closed_bytes, proved_bytes)


def _promise(run: Run) -> tuple[bool, int, int, int]:
    """Return a key that is higher for runs that most often need little memory.

    These have full checkpointing, the smallest micro-batches, and an inner axis of two ranks: one axis splits the
    sequence, the other heads, which not all devices may divide.
    """
    sizes = [size for size in run.mesh.shape if size > 1]
    return run.ac == "full", run.micro_batches, -abs(len(sizes) - 2), -sizes[-1] if sizes else 0


def all_runs(planner: RunPlanner, meshes: Sequence[MeshSpec], counts: Sequence[int], modes: Sequence[str]) -> list[Run]:
    """Return every run of the search space."""
    return [planner.run_of(*each) for each in itertools.product(meshes, counts, modes)]
