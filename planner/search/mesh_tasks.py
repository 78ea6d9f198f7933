"""The tasks of the walk over meshes: a mesh is bounded, a lane followed to its next run, a run solved."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cost_model.layouts.layout import MeshSpec
from planner.errors import SolverError
from planner.ilp.relaxation import relax
from planner.pricing.run_spec import Run
from planner.run.compute_bound import least_compute_s, least_recompute_s
from planner.run.mesh_bound import MeshBound, bound_mesh
from planner.run.run_planner import RelaxedRun, RunPlanner, SolvedRun
from planner.search.worker_context import WorkerContext


def least_s(search: RunPlanner, run: Run) -> float:
    """Return what no plan of ``run`` can beat: its compute, perfectly split."""
    return least_compute_s(search.model, search.op_times, run, search.micro_batch(run))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedMesh:
    """What bounds a mesh.

    Attributes:
        has_layout: whether the model runs on it at all.
        floor: None where nothing fits, or none of its runs is wanted.
        bounds_s: mode of checkpointing, of those that may fit -> what no run with it can beat.
    """

    has_layout: bool
    floor: MeshBound | None = None
    bounds_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundMesh:
    """Find the floor of a mesh, by its run in the fewest micro-batches, the first of ``counts``."""

    mesh: MeshSpec
    counts: Sequence[int]
    modes: Sequence[str]

    def __call__(self, bench: WorkerContext) -> BoundedMesh:
        """Return what bounds the mesh."""
        search, restriction = bench.search, bench.restrict(self.mesh)
        formulation = search.formulate(search.run_of(self.mesh, self.counts[0], "none"), restriction, peak=False)[2]
        if formulation is None:
            return BoundedMesh(has_layout=False)
        more_s = {}
        for ac in self.modes:
            runs = [search.run_of(self.mesh, count, ac) for count in self.counts]
            if any(search.least_memory_bytes(run) <= search.memory_bytes for run in runs):
                more_s[ac] = least_recompute_s(search.model, search.op_times, runs[0], search.micro_batch(runs[0]))
        with search.clock.stage("solve_s"):
            floor = bound_mesh(self.mesh, formulation, search.memory_bytes, min(more_s.values(), default=0.0))
            if floor is None:
                return BoundedMesh(has_layout=relax(formulation.problem) is not None)
            bounds_s = {ac: floor.with_work(backward_s) for ac, backward_s in more_s.items()}
        return BoundedMesh(has_layout=True, floor=floor.light(), bounds_s=bounds_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedPair:
    """What came of following a lane.

    Attributes:
        bound_s: no later run of the lane can beat it.
        counts: numbers of micro-batches that were not looked at yet.
        micro_batches: of the run that was looked at; None where the lane came to its end.
        look: at that run.
    """

    bound_s: float
    counts: tuple[int, ...] = ()
    micro_batches: int | None = None
    look: RelaxedRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxRun:
    """Relax the next run of a (mesh, checkpointing) pair that could take less than ``at_most_s`` (None: any)."""

    floor: MeshBound
    ac: str
    counts: tuple[int, ...]
    bound_s: float
    at_most_s: float | None

    def __call__(self, bench: WorkerContext) -> RelaxedPair:
        """Return what was seen; a bound of at least ``at_most_s`` where nothing of the lane is wanted."""
        search, mesh = bench.search, self.floor.mesh
        bound_s, wanted_s = self.bound_s, math.inf if self.at_most_s is None else self.at_most_s
        for index, count in enumerate(self.counts):
            run = search.run_of(mesh, count, self.ac)
            if search.least_memory_bytes(run) > search.memory_bytes:
                continue
            bound_s = max(bound_s, least_s(search, run))
            if bound_s >= wanted_s:
                return RelaxedPair(bound_s=bound_s)
            look = search.relax_run(run, bench.restrict(mesh), self.floor, self.at_most_s)
            if look is None:
                return RelaxedPair(bound_s=wanted_s)
            left = self.counts[index + 1 :]
            return RelaxedPair(bound_s=max(bound_s, look.uncapped_s), counts=left, micro_batches=count, look=look)
        return RelaxedPair(bound_s=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveRun:
    """Solve a run.

    Attributes:
        floor: of its mesh, where it is known.
        at_most_s: a plan that takes as long is not wanted; None: any is.
        mip_gap: relative gap at which the solver may stop; None takes the job's.
        left_s: after so many seconds the best so far is the answer; None: it takes its time.
        solving_s: at least as long is left for solving, whatever formulating it took.
        steps: relaxations to branch through, after which the best so far is the answer; None: all it takes.
    """

    mesh: MeshSpec
    micro_batches: int
    ac: str
    floor: MeshBound | None = None
    at_most_s: float | None = None
    mip_gap: float | None = None
    left_s: float | None = None
    solving_s: float = 0.0
    steps: int | None = None

    def __call__(self, bench: WorkerContext) -> SolvedRun | SolverError | None:
        """Return the best plan, None where none is wanted and fits, or why there was no answer."""
        search = bench.search
        try:
            found = search.solve(
                search.run_of(self.mesh, self.micro_batches, self.ac),
                bench.restrict(self.mesh),
                self.at_most_s,
                self.floor,
                mip_gap=self.mip_gap,
                deadline=None if self.left_s is None else time.perf_counter() + self.left_s,
                solving_s=self.solving_s,
                steps=self.steps,
            )
        except SolverError as error:
            return error
        return SolvedRun.of(found)
