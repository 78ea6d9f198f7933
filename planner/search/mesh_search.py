"""Over all runs of a job: meshes, modes of checkpointing, numbers of micro-batches.

A *lane* is a mesh with a mode of checkpointing; its runs differ in the number of micro-batches, of which each divides
the next, and more of them never make a step faster but where they leave room for faster layouts. So a lane starts with
the fewest, and has a bound that no later run of it can beat: at first the mesh's floor, then the relaxation without a
memory cap of the run last looked at. What no plan of a single run can beat is its relaxation within the cap. Of meshes
to be bounded, lanes to be followed and runs to be solved, what has the lowest bound goes next, until no bound is better
than the best plan, or time is up. What is left could still reach its lowest bound: that is the bound of the whole
search.

Several of these can go next at once, in a `Pool`. A look then knows of the best plan as it was when the look began:
less is left out, and what is proved is as true.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cost_model.layouts.layout import MeshSpec
from planner.errors import SolverError
from planner.graph.trace_module import divisor_chains
from planner.plan.estimate import MeshOutcome, MeshReport
from planner.run.mesh_bound import MeshBound
from planner.run.run_planner import Candidate, RunPlanner, SolvedRun
from planner.search.mesh_tasks import BoundedMesh, BoundMesh, RelaxedPair, RelaxRun, SolveRun, least_s
from planner.search.task_pool import Pool
from planner.search.worker_context import Restrict, SearchConstraints, WorkerContext

Progress = Callable[[str], None]

_FIRST_GAP = 0.1
"""How far from the best in its run the first plan may be: it is only there to tell what is not worth a look."""

_TRIED_STEPS = 30
"""Relaxations to branch through when a run is first solved: a plan that others are to beat is often there by then, and
to prove that it is the best of its run can take many times as long."""

_FIRST_S = 3.0
"""So long at least the first plan may be solved for: formulating it was most of the work, whatever the time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSearchResult:
    """The best plan of a search.

    Attributes:
        candidate: None where none was found that takes less than was wanted of it (`MeshSearch.want_less`).
        bound_s: no plan of the search space is faster.
        complete: whether the search ended by itself; otherwise its time was up.
        meshes: what became of each, where there was more than one.
    """

    candidate: Candidate | None
    bound_s: float
    complete: bool
    meshes: tuple[MeshReport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Closed:
    """A mesh that is not bounded yet, but by its compute, perfectly split."""

    mesh: MeshSpec
    place: str
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    """Runs on one mesh with one mode of checkpointing that were not looked at yet, by numbers of micro-batches."""

    floor: MeshBound
    ac: str
    counts: tuple[int, ...]
    bound_s: float

    @property
    def mesh(self) -> MeshSpec:
        return self.floor.mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A run of a lane that is still to be solved, and what no plan of it that fits can beat.

    Attributes:
        is_tried: whether a few steps of solving it were not enough.
    """

    lane: _Lane
    micro_batches: int
    bound_s: float
    is_tried: bool = False

    @property
    def mesh(self) -> MeshSpec:
        return self.lane.mesh


_Item = _Closed | _Lane | _Open
_Task = BoundMesh | RelaxRun | SolveRun


@dataclass(slots=True)
class _Mesh:
    """What is known of a mesh: what no plan on it that fits can beat, once nothing of it is left on the heap."""

    least_s: float = math.inf
    has_layout: bool = True
    best_s: float = math.inf

    def bounded(self, time_s: float) -> None:
        self.least_s = min(self.least_s, time_s)


@dataclass(slots=True)
class MeshSearch:
    """One walk over the lanes of a job, a `planner.search.co_search.Walk`.

    Attributes:
        pool: does the tasks; None: this process does.
    """

    search: RunPlanner
    counts: Sequence[int]
    modes: Sequence[str]
    restrict: Restrict
    progress: Progress | None = None
    deadline: float | None = None
    pool: Pool | None = None
    _best: SolvedRun | None = None
    _limit_s: float = math.inf
    _all: Sequence[MeshSpec] = ()
    _heap: list[tuple[float, int, _Item]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _proved_s: float = math.inf
    _given_up_s: float = math.inf
    _cut_short: bool = False
    _unsolved: SolverError | None = None
    _meshes: dict[MeshSpec, _Mesh] = field(default_factory=dict)
    _here: Pool = field(init=False)

    def __post_init__(self) -> None:
        terms = SearchConstraints(memory_bytes=self.search.memory_bytes, restrict=self.restrict)
        self._here = Pool(WorkerContext(self.search)).under(terms)

    def best(self, meshes: Sequence[MeshSpec]) -> MeshSearchResult | None:
        """Return the fastest plan over all runs, None where none fits.

        Raises:
            SolverError: time was up before any plan was found.
        """
        if len(meshes) == len(self.counts) == len(self.modes) == 1:
            return self._only(meshes[0])
        self.start(meshes)
        (self.pool or self._here).run(self.pick, self.done)
        return self.found()

    def start(self, meshes: Sequence[MeshSpec]) -> None:
        """Find a first plan, and what is to be walked over."""
        self._all, here = meshes, self._here
        # The first tasks are done here: what they leave behind all others need.
        # Devices in a row leave little to choose: done with in no time, they tell the others what to beat.
        first = [mesh for mesh in meshes if len(mesh.shape) == 1 and self._splits_evenly(mesh)]
        others = [mesh for mesh in meshes if mesh not in first]
        self._close(first, of=meshes)
        here.run(self.pick, self.done)
        if self._best is None and others:
            self._dive(min(others, key=self._strangeness), here)
        self._close(others, of=meshes)

    def _splits_evenly(self, mesh: MeshSpec) -> bool:
        """Tell whether all devices of a mesh divide the batch in some number of micro-batches."""
        return any(self.search.batch // count % mesh.size == 0 for count in self.counts)

    def _strangeness(self, mesh: MeshSpec) -> float:
        """Return how far the inner axis is from the devices of a node, in powers of two: what most people take."""
        return abs(math.log2(mesh.shape[-1] / self.search.cluster.devices_per_node))

    def _dive(self, mesh: MeshSpec, here: Pool) -> None:
        """Find a first plan where one is likely: recomputing, in the smallest micro-batches that split the batch."""
        if self._is_over:
            return
        counts = [count for count in self.counts if self.search.batch // count % mesh.shape[0] == 0]
        task = SolveRun(
            mesh=mesh,
            micro_batches=max(counts, default=self.counts[-1]),
            ac=self.modes[-1],
            mip_gap=_FIRST_GAP,
            left_s=self._left_s,
            solving_s=_FIRST_S,
        )
        self._say_solving(task, ", for a first plan")
        found = here.do(task)
        if isinstance(found, SolvedRun):  # the walk does without, if there is time
            self._keep(found)

    def _only(self, mesh: MeshSpec) -> MeshSearchResult | None:
        """One run has nothing to be compared with."""
        run = self.search.run_of(mesh, self.counts[0], self.modes[0])
        self._say(f"solving mesh {mesh}, {run.micro_batches} micro-batches, checkpointing {run.ac}")
        candidate = self.search.solve(run, self.restrict(mesh), deadline=self.deadline)
        if candidate is None or candidate.solution is None:
            return None
        complete = candidate.solution.status == "optimal"
        return MeshSearchResult(candidate=candidate, bound_s=candidate.solution.bound_s, complete=complete)

    # --- what comes next -----------------------------------------------------------------------------------------

    def _close(self, meshes: Sequence[MeshSpec], *, of: Sequence[MeshSpec]) -> None:
        """Put meshes on the heap that nothing is known of."""
        for mesh in meshes:
            bound_s = least_s(self.search, self.search.run_of(mesh, self.counts[0], "none"))
            self._push(_Closed(mesh=mesh, place=f"{of.index(mesh) + 1} of {len(of)}", bound_s=bound_s))

    def _push(self, item: _Item, *, at_once: bool = False) -> None:
        heapq.heappush(self._heap, (-math.inf if at_once else item.bound_s, next(self._numbers), item))

    @property
    def _is_over(self) -> bool:
        """Whether there is no time for another task."""
        return self.deadline is not None and time.perf_counter() >= self.deadline

    @property
    def _left_s(self) -> float | None:
        return None if self.deadline is None else max(self.deadline - time.perf_counter(), 0.0)

    @property
    def _at_most_s(self) -> float | None:
        """The step time from which on a plan is not worth finding."""
        return None if math.isinf(self.wanted_s) else self.wanted_s

    @property
    def wanted_s(self) -> float:
        """The same; infinite where any plan is worth it."""
        if self._best is None:
            return self._limit_s
        return min(self._best.estimate.step_time_s * (1.0 - self.search.job.mip_gap), self._limit_s)

    def want_less(self, time_s: float) -> None:
        """From now on want no plan that takes ``time_s`` or more."""
        self._limit_s = min(self._limit_s, time_s)

    def _is_wanted(self, bound_s: float) -> bool:
        return bound_s < self.wanted_s

    @property
    def next_s(self) -> float:
        """The lowest bound of what goes next; infinite where nothing that is known could be better, or time is up."""
        if not self._heap or not self._is_wanted(self._heap[0][0]) or self._cut_short or self._is_over:
            return math.inf
        return self._heap[0][0]

    def pick(self) -> tuple[_Item, _Task] | None:
        """Return what goes next; None where there is nothing."""
        if self.next_s == math.inf:
            return None
        item = heapq.heappop(self._heap)[2]
        return item, self._task(item)

    def _task(self, item: _Item) -> _Task:
        if isinstance(item, _Closed):
            self._say(f"bounding mesh {item.mesh} ({item.place})")
            return BoundMesh(mesh=item.mesh, counts=tuple(self.counts), modes=self.modes)
        if isinstance(item, _Lane):
            return RelaxRun(
                floor=item.floor, ac=item.ac, counts=item.counts, bound_s=item.bound_s, at_most_s=self._at_most_s
            )
        task = SolveRun(
            mesh=item.mesh,
            micro_batches=item.micro_batches,
            ac=item.lane.ac,
            floor=item.lane.floor,
            at_most_s=self._at_most_s,
            left_s=self._left_s,
            steps=None if item.is_tried else _TRIED_STEPS,
        )
        self._say_solving(task)
        return task

    # --- what came of it -----------------------------------------------------------------------------------------

    def done(self, item: _Item, task: _Task, found: BoundedMesh | RelaxedPair | SolvedRun | SolverError | None) -> None:
        """Note what came of a task."""
        if isinstance(item, _Closed):
            assert isinstance(found, BoundedMesh)
            self._opened(item.mesh, found)
        elif isinstance(item, _Lane):
            assert isinstance(found, RelaxedPair)
            self._followed(item, found)
        else:
            assert isinstance(task, SolveRun)
            assert not isinstance(found, BoundedMesh | RelaxedPair)
            self._solved(item, task, found)

    def _opened(self, mesh: MeshSpec, found: BoundedMesh) -> None:
        """Open the lanes of a mesh."""
        self._of(mesh).has_layout = found.has_layout
        if found.floor is None:
            return
        for ac, bound_s in found.bounds_s.items():
            for counts in divisor_chains(self.counts):
                self._push(_Lane(floor=found.floor, ac=ac, counts=counts, bound_s=bound_s))

    def _followed(self, lane: _Lane, found: RelaxedPair) -> None:
        """Put the run that was looked at on the heap, and the lane back."""
        known, look = self._of(lane.mesh), found.look
        if look is None or found.micro_batches is None:
            known.bounded(found.bound_s)
            return
        if look.capped_s is not None and self._is_wanted(look.capped_s):
            # What comes of a few steps of solving it tells all others what to beat.
            item = _Open(lane=lane, micro_batches=found.micro_batches, bound_s=look.capped_s)
            self._push(item, at_once=True)
        elif self._at_most_s is not None:
            known.bounded(self._at_most_s)  # what is not wanted was left out, and may fit and take no more than that
        if found.counts:
            self._push(dataclasses.replace(lane, counts=found.counts, bound_s=found.bound_s))

    def _solved(self, item: _Open, task: SolveRun, found: SolvedRun | SolverError | None) -> None:
        """Keep what was found of a run."""
        known = self._of(item.mesh)
        if isinstance(found, SolverError) and self._is_over:
            self._push(item)
            self._cut_short = True
        elif isinstance(found, SolverError):
            # It broke off, and the others may do without: what this run could reach is left in the gap.
            self._unsolved, self._given_up_s = found, min(self._given_up_s, item.bound_s)
            known.bounded(item.bound_s)
        elif task.steps is not None and (found is None or found.solution.hit_limit):
            if found is not None:
                item = dataclasses.replace(item, bound_s=max(item.bound_s, found.solution.bound_s))
                self._keep(found)
            self._push(dataclasses.replace(item, is_tried=True))
        elif found is None:
            # Nothing that is wanted; what is not wanted may fit or not.
            known.bounded(math.inf if task.at_most_s is None else max(item.bound_s, task.at_most_s))
        else:
            self._proved_s = min(self._proved_s, found.solution.bound_s)
            self._cut_short |= found.solution.hit_limit
            known.bounded(found.solution.bound_s)
            self._keep(found)

    def _keep(self, found: SolvedRun) -> None:
        """Note a plan, and take it where it is the best."""
        known, time_s = self._of(found.run.mesh), found.estimate.step_time_s
        known.best_s = min(known.best_s, time_s)
        if self._best is None or time_s < self._best.estimate.step_time_s:
            self._best = found
            self._say(f"best so far {time_s:.6g} s")

    def found(self) -> MeshSearchResult | None:
        """Return the fastest plan of what was walked over, None where none fits.

        Raises:
            SolverError: time was up before any plan was found, here or elsewhere.
        """
        left_s = min((item.bound_s for _, _, item in self._heap), default=math.inf)
        if math.isinf(self.wanted_s):
            if self._unsolved is not None:
                raise self._unsolved
            if self._heap:
                raise SolverError("time was up before any plan was found.", what_to_do="Allow a longer search.")
            return None
        complete = left_s >= self.wanted_s and math.isinf(self._given_up_s) and not self._cut_short
        # Runs that were solved are bounded by their solver, those given up by what was wanted of them, and the rest.
        bound_s = min(left_s, self._given_up_s, self._proved_s, self.wanted_s)
        candidate = None if self._best is None else self.search.candidate(self._best)
        return MeshSearchResult(
            candidate=candidate, bound_s=bound_s, complete=complete, meshes=self._reports(self._all)
        )

    def _of(self, mesh: MeshSpec) -> _Mesh:
        return self._meshes.setdefault(mesh, _Mesh())

    def _reports(self, meshes: Sequence[MeshSpec]) -> tuple[MeshReport, ...]:
        """Return what became of each mesh, once a plan was found."""
        if len(meshes) == 1:
            return ()
        for _, _, item in self._heap:
            self._of(item.mesh).bounded(item.bound_s)
        return tuple(self._report(mesh) for mesh in meshes)

    def _report(self, mesh: MeshSpec) -> MeshReport:
        known = self._of(mesh)
        least_s = min(known.least_s, known.best_s)
        outcome: MeshOutcome = "slower" if least_s >= self.wanted_s else "open"
        if self._best is not None and mesh == self._best.run.mesh:
            outcome = "chosen"
        elif not known.has_layout:
            outcome = "no-layout"
        elif math.isinf(least_s):
            outcome = "does-not-fit"
        at_least_s = None if math.isinf(least_s) else least_s
        found_s = None if math.isinf(known.best_s) else known.best_s
        return MeshReport(mesh=str(mesh), outcome=outcome, at_least_s=at_least_s, step_time_s=found_s)

    def _say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what)

    def _say_solving(self, task: SolveRun, why: str = "") -> None:
        self._say(f"solving mesh {task.mesh}, {task.micro_batches} micro-batches, checkpointing {task.ac}{why}")
