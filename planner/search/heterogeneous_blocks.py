"""The best plan in which blocks are alike, and what it gains where the first of them differ from the rest.

The walk over meshes keeps equal blocks alike, which keeps its programs small. A cap on memory then asks all or nothing
of them: all are run again, or all stored split, where a part would do. Here the best run is solved again with its
first k blocks apart: fewer of them checkpointed, or laid out in another way. Each program has a part more to decide,
and is asked only for what is faster than the best so far, which its relaxation mostly refutes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from cost_model.layouts.layout import MeshSpec
from planner.errors import SolverError
from planner.plan.job import Checkpointing
from planner.regions.block_grouping import Grouping
from planner.run.baselines import Restriction
from planner.run.run_planner import Candidate, RunPlanner
from planner.search.mesh_search import MeshSearchResult, Progress

_WORTH = 0.005
"""By how much faster a plan has to be to be worth blocks that differ: relative, of the best so far."""

_STEPS = 48
"""Relaxations to branch through in each program: most of what is to be found, and as much on any machine."""

_MORE_STEPS = 4 * _STEPS
"""In the one program that found most, where its relaxation leaves room for more."""

_FINEST = 4
"""How many blocks are checkpointed is settled to within this part of a list."""


def improve_with_heterogeneous_blocks(
    search: RunPlanner,
    found: MeshSearchResult,
    modes: Sequence[str],
    restrict: Callable[[MeshSpec], Restriction | None],
    progress: Progress | None = None,
    deadline: float | None = None,
) -> MeshSearchResult:
    """Return the best plan of the run that was ``found``, with the first blocks of each list apart where that pays.

    Args:
        modes: of checkpointing that the job leaves to choose from.
    """
    assert found.candidate is not None
    restriction = restrict(found.candidate.run.mesh)
    return _Variation(search, found, found.candidate, restriction, progress, deadline).best(len(modes) > 1)


class _Variation:
    def __init__(
        self,
        search: RunPlanner,
        found: MeshSearchResult,
        candidate: Candidate,
        restriction: Restriction | None,
        progress: Progress | None,
        deadline: float | None,
    ) -> None:
        self._search, self._restriction = search, restriction
        self._progress, self._deadline = progress, deadline
        self._best, self._bound_s = candidate, found.bound_s
        self._found, self._complete = found, found.complete
        self._length = max((len(blocks) for blocks in search.model.blocks.lists.values()), default=0)

    def best(self, may_checkpoint: bool) -> MeshSearchResult:
        """Try what could be faster; ``may_checkpoint``: how many blocks are checkpointed may differ as well."""
        if self._length < 2 or not self._complete:
            return self._found
        if may_checkpoint and self._best.run.ac in ("selective", "full"):
            self._checkpoint_fewer()
        if self._best is self._found.candidate:
            self._lay_out_apart()  # blocks that are not checkpointed alike are apart already
        return dataclasses.replace(self._found, candidate=self._best, bound_s=self._bound_s, complete=self._complete)

    @property
    def _could_gain(self) -> bool:
        """Whether the relaxation leaves room: it takes a part of one layout and a part of another at will.

        It does not tell of the ends: what waits for the first block alone (its gather) or the last is charged to all.
        """
        solution = self._best.solution
        assert solution is not None
        return solution.root_s is None or solution.root_s < solution.objective_s * (1.0 - _WORTH)

    def _checkpoint_fewer(self) -> None:
        """Halve the interval in which the fewest blocks lie that have to be checkpointed."""
        mode, (fewer, enough) = self._best.run.ac, (0, self._length)
        while enough - fewer > max(1, self._length // _FINEST):
            count = (fewer + enough) // 2
            if self._improves(str(Checkpointing(mode, count)), None):
                enough = count
            else:
                fewer = count

    def _lay_out_apart(self) -> None:
        """Try to part the blocks at either end, in the middle, and between; then around what was best."""
        n, tried, best = self._length, set[int](), 0
        for count in (1, n - 1, n // 2, n // 4, n - n // 4):
            if self._is_new(count, tried) and self._improves(self._best.run.ac, count):
                best = count
        step = n // 8 if best else 0
        while step:
            for count in (best - step, best + step):
                if self._is_new(count, tried) and self._improves(self._best.run.ac, count):
                    best = count
            step //= 2
        if best and self._could_gain:
            self._improves(self._best.run.ac, best, _MORE_STEPS)

    def _is_new(self, count: int, tried: set[int]) -> bool:
        """Tell whether so many blocks apart are worth a try, and note it."""
        if count in tried or not 0 < count < self._length:
            return False
        if count not in (1, self._length - 1) and not self._could_gain:
            return False
        tried.add(count)
        return True

    def _improves(self, ac: str, apart: int | None, steps: int = _STEPS) -> bool:
        """Solve a variant of the best run; keep it where it is faster. The best itself may be one, with more steps."""
        known = self._best.run
        run = self._search.run_of(known.mesh, known.micro_batches, ac, apart)
        if (run.grouping == known.grouping and steps == _STEPS) or not self._complete:
            return False
        self._say(run.ac, run.grouping, apart)
        at_most_s = self._best.estimate.step_time_s * (1.0 - _WORTH)
        try:
            candidate = self._search.solve(run, self._restriction, at_most_s, deadline=self._deadline, steps=steps)
        except SolverError:
            candidate = None  # it broke off: this variant is left out
        self._complete = self._deadline is None or time.perf_counter() < self._deadline
        if candidate is None or candidate.solution is None:
            return False
        self._keep(candidate)
        return True

    def _keep(self, candidate: Candidate) -> None:
        solution = candidate.solution
        assert solution is not None
        self._best = candidate
        # Of the plans in which blocks differ few were tried; what none of them can beat is the relaxation.
        least_s = solution.bound_s if solution.root_s is None else solution.root_s
        self._bound_s = min(self._bound_s, least_s)
        if self._progress is not None:
            self._progress(f"best so far {candidate.estimate.step_time_s:.6g} s")

    def _say(self, ac: str, grouping: Grouping, apart: int | None) -> None:
        if self._progress is not None:
            front = f", the first {apart} blocks apart" if apart is not None else ""
            self._progress(f"solving once more: checkpointing {ac}{front}")
