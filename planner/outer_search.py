"""Over all runs of a job: meshes, modes of checkpointing, numbers of micro-batches.

A *lane* is a mesh with a mode of checkpointing; its runs differ in the number of micro-batches, and more of them never
make a step faster but where they leave room for faster layouts. So a lane starts with the fewest, and has a bound that
no later run of it can beat: at first the mesh's floor, then the relaxation without a memory cap of the run last looked
at. What no plan of a single run can beat is its relaxation within the cap. Of lanes to be followed and runs to be
solved, what has the lowest bound goes next, until no bound is better than the best plan, or time is up. What is left
could still reach its lowest bound: that is the bound of the whole search.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cost_model.layout import MeshSpec
from planner.baselines import Restriction
from planner.candidates import least_compute_s, least_recompute_s
from planner.errors import SolverError
from planner.floors import Floor, floor_of
from planner.report import MeshOutcome, MeshReport
from planner.run import Run
from planner.search import Candidate, Search

Progress = Callable[[str], None]

_FIRST_GAP = 0.1
"""How far from the best in its run the first plan may be: it is only there to tell what is not worth a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best plan of a search.

    Attributes:
        bound_s: no plan of the search space is faster.
        complete: whether the search ended by itself; otherwise its time was up.
        meshes: what became of each, where there was more than one.
    """

    candidate: Candidate
    bound_s: float
    complete: bool
    meshes: tuple[MeshReport, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Lane:
    """Runs on one mesh with one mode of checkpointing that were not looked at yet."""

    floor: Floor
    ac: str
    restriction: Restriction | None
    counts: list[int]
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A run of a lane that is still to be solved, and what no plan of it that fits can beat."""

    run: Run
    lane: _Lane
    bound_s: float


@dataclass(slots=True)
class _Mesh:
    """What is known of a mesh: what no plan on it that fits can beat, once nothing of it is left on the heap."""

    least_s: float = math.inf
    has_layout: bool = True
    best: Candidate | None = None

    def bounded(self, time_s: float) -> None:
        self.least_s = min(self.least_s, time_s)


@dataclass(slots=True)
class OuterSearch:
    """One walk over the lanes of a job."""

    search: Search
    counts: Sequence[int]
    modes: Sequence[str]
    restrict: Callable[[MeshSpec], Restriction | None]
    progress: Progress | None = None
    deadline: float | None = None
    _best: Candidate | None = None
    _heap: list[tuple[float, int, _Lane | _Open]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _proved_s: float = math.inf
    _unopened_s: float = math.inf
    _unsolved: SolverError | None = None
    _meshes: dict[MeshSpec, _Mesh] = field(default_factory=dict)

    def best(self, meshes: Sequence[MeshSpec]) -> Found | None:
        """Return the fastest plan over all runs, None where none fits.

        Raises:
            SolverError: time was up before any plan was found.
        """
        if len(meshes) == len(self.counts) == len(self.modes) == 1:
            return self._only(meshes[0])
        # Devices in a row leave little to choose: done with in no time, they tell the others what to beat.
        first = [mesh for mesh in meshes if len(mesh.shape) == 1 and self._splits_evenly(mesh)]
        self._open_all(first, of=meshes)
        self._walk()
        others = [mesh for mesh in meshes if mesh not in first]
        if self._best is None and others:
            self._dive(min(others, key=self._strangeness))
        self._open_all(others, of=meshes)
        complete = self._walk() and math.isinf(self._unopened_s)
        if self._best is None:
            if self._unsolved is not None:
                raise self._unsolved
            return None
        left_s = min((item.bound_s for _, _, item in self._heap), default=math.inf)
        assert self._at_most_s is not None
        # Runs that were solved are bounded by their solver, those given up by what was wanted of them, and the rest.
        bound_s = min(left_s, self._unopened_s, self._proved_s, self._at_most_s)
        return Found(candidate=self._best, bound_s=bound_s, complete=complete, meshes=self._reports(meshes))

    def _splits_evenly(self, mesh: MeshSpec) -> bool:
        """Tell whether all devices of a mesh divide the batch in some number of micro-batches."""
        return any(self.search.batch // count % mesh.size == 0 for count in self.counts)

    def _open_all(self, meshes: Sequence[MeshSpec], *, of: Sequence[MeshSpec]) -> None:
        for mesh in meshes:
            if self._is_over:
                least_s = self._least_s(self.search.run_of(mesh, self.counts[0], "none"))
                self._unopened_s = min(self._unopened_s, least_s)
                self._of(mesh).bounded(least_s)
            else:
                self._say(f"bounding mesh {mesh} ({of.index(mesh) + 1} of {len(of)})")
                self._open(mesh)

    def _of(self, mesh: MeshSpec) -> _Mesh:
        return self._meshes.setdefault(mesh, _Mesh())

    def _reports(self, meshes: Sequence[MeshSpec]) -> tuple[MeshReport, ...]:
        """Return what became of each mesh, once a plan was found."""
        if len(meshes) == 1:
            return ()
        for _, _, item in self._heap:
            self._of(item.run.mesh if isinstance(item, _Open) else item.floor.mesh).bounded(item.bound_s)
        return tuple(self._report(mesh) for mesh in meshes)

    def _report(self, mesh: MeshSpec) -> MeshReport:
        known = self._of(mesh)
        assert self._best is not None
        assert self._at_most_s is not None
        found_s = None if known.best is None else known.best.estimate.step_time_s
        least_s = known.least_s if found_s is None else min(known.least_s, found_s)
        outcome: MeshOutcome = "slower" if least_s >= self._at_most_s else "open"
        if mesh == self._best.run.mesh:
            outcome = "chosen"
        elif not known.has_layout:
            outcome = "no-layout"
        elif math.isinf(least_s):
            outcome = "does-not-fit"
        at_least_s = None if math.isinf(least_s) else least_s
        return MeshReport(mesh=str(mesh), outcome=outcome, at_least_s=at_least_s, step_time_s=found_s)

    @property
    def _is_over(self) -> bool:
        """Whether there is a plan and no time for another.

        Raises:
            SolverError: there is no time, and no plan either.
        """
        if self.deadline is None or time.perf_counter() < self.deadline:
            return False
        if self._best is None:
            raise SolverError("time was up before any plan was found.", what_to_do="Allow a longer search.")
        return True

    def _strangeness(self, mesh: MeshSpec) -> float:
        """Return how far the inner axis is from the devices of a node, in powers of two: what most people take."""
        return abs(math.log2(mesh.shape[-1] / self.search.cluster.devices_per_node))

    def _dive(self, mesh: MeshSpec) -> None:
        """Find a first plan where one is likely: recomputing, in the smallest micro-batches that split the batch."""
        search, first = self.search, mesh.shape[0]
        counts = [count for count in self.counts if search.batch // count % first == 0]
        run = search.run_of(mesh, max(counts, default=self.counts[-1]), self.modes[-1])
        self._say(f"solving mesh {mesh}, {run.micro_batches} micro-batches, checkpointing {run.ac}, for a first plan")
        try:
            self._best = search.solve(run, self.restrict(mesh), mip_gap=_FIRST_GAP, deadline=self.deadline)
        except SolverError:
            return  # the walk does without, if there is time
        self._of(mesh).best = self._best
        self._say_best()

    def _only(self, mesh: MeshSpec) -> Found | None:
        """One run has nothing to be compared with."""
        run = self.search.run_of(mesh, self.counts[0], self.modes[0])
        self._say(f"solving mesh {mesh}, {run.micro_batches} micro-batches, checkpointing {run.ac}")
        candidate = self.search.solve(run, self.restrict(mesh), deadline=self.deadline)
        if candidate is None or candidate.solution is None:
            return None
        complete = candidate.solution.status == "optimal"
        return Found(candidate=candidate, bound_s=candidate.solution.bound_s, complete=complete)

    def _say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what)

    def _say_best(self) -> None:
        if self._best is not None:
            self._say(f"best so far {self._best.estimate.step_time_s:.6g} s")

    @property
    def _at_most_s(self) -> float | None:
        """The step time from which on a plan is not worth finding."""
        return None if self._best is None else self._best.estimate.step_time_s * (1.0 - self.search.job.mip_gap)

    def _open(self, mesh: MeshSpec) -> None:
        """Find the floor of a mesh, and open its lanes."""
        search, restriction = self.search, self.restrict(mesh)
        largest = search.run_of(mesh, self.counts[0], "none")
        formulation = search.formulate(largest, restriction)[2]
        with search.clock.stage("solve_s"):
            floor = None if formulation is None else floor_of(mesh, formulation)
        if floor is None:
            self._of(mesh).has_layout = False
            return
        for ac in self.modes:
            run = search.run_of(mesh, self.counts[0], ac)
            more_s = least_recompute_s(search.traced, search.op_times, run, search.micro_batch(run))
            with search.clock.stage("solve_s"):
                bound_s = floor.with_work(more_s)
            lane = _Lane(floor=floor, ac=ac, restriction=restriction, counts=list(self.counts), bound_s=bound_s)
            self._push(lane)

    def _push(self, item: _Lane | _Open, *, at_once: bool = False) -> None:
        heapq.heappush(self._heap, (-math.inf if at_once else item.bound_s, next(self._numbers), item))

    def _walk(self) -> bool:
        """Go on until nothing is left that could be better; return whether that came before the deadline."""
        while self._heap:
            at_most_s = self._at_most_s
            if at_most_s is not None and self._heap[0][0] >= at_most_s:
                return True
            if self._is_over:
                return False
            _, _, item = heapq.heappop(self._heap)
            if isinstance(item, _Lane):
                self._follow(item)
            elif not self._solve(item):
                self._push(item)
                return False
        return True

    def _follow(self, lane: _Lane) -> None:
        """Look at the next run of a lane that could be better; put it on the heap, and the lane back."""
        at_most_s, known = self._at_most_s, self._of(lane.floor.mesh)
        while lane.counts:
            run = self.search.run_of(lane.floor.mesh, lane.counts.pop(0), lane.ac)
            if self.search.least_memory_bytes(run) > self.search.memory_bytes:
                continue
            lane.bound_s = max(lane.bound_s, self._least_s(run))
            if at_most_s is not None and lane.bound_s >= at_most_s:
                known.bounded(lane.bound_s)
                return
            look = self.search.look_at(run, lane.restriction, lane.floor, at_most_s)
            if look is None:
                known.bounded(math.inf if at_most_s is None else at_most_s)
                return
            lane.bound_s = max(lane.bound_s, look.uncapped_s)
            if at_most_s is not None and (look.capped_s is None or look.capped_s >= at_most_s):
                known.bounded(at_most_s)  # what is not wanted was left out, and may fit and take no more than that
            elif look.capped_s is not None:
                # A relaxation that is a plan is solved at no cost, and tells all others what to beat.
                self._push(_Open(run=run, lane=lane, bound_s=look.capped_s), at_once=look.is_whole)
            if lane.counts:
                self._push(lane)
            return

    def _solve(self, item: _Open) -> bool:
        """Solve a run; return whether that came to its end before the deadline."""
        run, lane, at_most_s = item.run, item.lane, self._at_most_s
        self._say(f"solving mesh {run.mesh}, {run.micro_batches} micro-batches, checkpointing {run.ac}")
        try:
            candidate = self.search.solve(run, lane.restriction, at_most_s, lane.floor, deadline=self.deadline)
        except SolverError as error:
            if self._is_over:
                return False
            # It broke off, and the others may do without: what this run could reach is left in the gap.
            self._unsolved, self._unopened_s = error, min(self._unopened_s, item.bound_s)
            self._of(run.mesh).bounded(item.bound_s)
            return True
        known = self._of(run.mesh)
        if candidate is None or candidate.solution is None:
            # Nothing that is wanted; what is not wanted may fit or not.
            known.bounded(math.inf if at_most_s is None else max(item.bound_s, at_most_s))
            return True
        self._best = known.best = candidate
        self._say_best()
        self._proved_s = min(self._proved_s, candidate.solution.bound_s)
        known.bounded(candidate.solution.bound_s)
        return not candidate.solution.cut_short

    def _least_s(self, run: Run) -> float:
        search = self.search
        return least_compute_s(search.traced, search.op_times, run, search.micro_batch(run))
