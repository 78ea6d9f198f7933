"""Tasks of the search over meshes: bound a mesh, relax a run, solve a run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cost_model.layouts.layout import MeshSpec
from planner.errors import SolverError
from planner.formulation.formulate import Formulation
from planner.ilp.relaxation import relax
from planner.plan.job import Checkpointing
from planner.pricing.run_spec import Run
from planner.run.compute_bound import least_compute_s, least_recompute_s
from planner.run.mesh_bound import MeshBound, bound_mesh
from planner.run.run_planner import RunPlanner
from planner.run.run_results import RelaxedRun, SolvedRun
from planner.search.worker_context import SearchConstraints, WorkerContext


def compute_bound_s(planner: RunPlanner, run: Run) -> float:
    """Return a lower bound on the step time of ``run`` in seconds: its compute, perfectly split."""
    return least_compute_s(planner.model, planner.op_times, run, planner.micro_batch(run))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedMesh:
    """Lower bounds on a mesh.

    Attributes:
        has_layout: whether the model has any layout on the mesh.
        mesh_bound: the bounds choice by choice; None if no plan fits.
        bounds_s: checkpointing mode -> lower bound in seconds on the step time of every run in this mode. Modes in
            which no run fits are left out.
    """

    has_layout: bool
    mesh_bound: MeshBound | None = None
    bounds_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundMesh:
    """A task that computes a lower bound on the step time of every plan on a mesh (`planner.run.mesh_bound`).

    It solves the linear relaxation of the program with the fewest micro-batches (``counts[0]``), without checkpointing.

    Attributes:
        counts: numbers of micro-batches to choose from, ascending.
        modes: checkpointing modes to choose from.
    """

    mesh: MeshSpec
    counts: Sequence[int]
    modes: Sequence[str]

    def __call__(self, context: WorkerContext, constraints: SearchConstraints) -> BoundedMesh:
        """Return the bounds of the mesh."""
        planner, memory_bytes = context.planner, constraints.memory_bytes
        # "full:8" splits the classes of equal blocks. The relaxed run has the same classes, as bounds are by class.
        leading_blocks = Checkpointing.parse(self.modes[0]).first
        largest = planner.run_of(self.mesh, self.counts[0], "none", leading_blocks)
        formulation = planner.formulate(largest, constraints.restrict(self.mesh), peak=False).formulation
        if formulation is None:
            return BoundedMesh(has_layout=False)
        recompute_s = {}
        for ac in self.modes:
            runs = [planner.run_of(self.mesh, count, ac) for count in self.counts]
            if any(planner.least_memory_bytes(run) <= memory_bytes for run in runs):
                micro_batch = planner.micro_batch(runs[0])
                recompute_s[ac] = least_recompute_s(planner.model, planner.op_times, runs[0], micro_batch)
        with planner.clock.stage("solve_s"):
            mesh_bound = bound_mesh(self.mesh, formulation, memory_bytes, min(recompute_s.values(), default=0.0))
            if mesh_bound is None:
                return BoundedMesh(has_layout=_has_layout(formulation))
            bounds_s = {ac: mesh_bound.with_recompute(seconds) for ac, seconds in recompute_s.items()}
        return BoundedMesh(has_layout=True, mesh_bound=mesh_bound.without_program(), bounds_s=bounds_s)


def _has_layout(formulation: Formulation) -> bool:
    """Return whether the program has a solution without a cap; True where the solver does not answer in time."""
    try:
        return relax(formulation.problem) is not None
    except SolverError:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedPair:
    """Bounds on a (mesh, checkpointing) pair after one more of its runs was relaxed.

    Attributes:
        bound_s: lower bound in seconds on the step time of the runs in ``counts``. If ``relaxed`` is None, it bounds
            all runs that were left.
        counts: numbers of micro-batches of the runs that are not relaxed yet.
        micro_batches: number of micro-batches of the run that was relaxed; None if ``relaxed`` is None.
        relaxed: bounds of this run; None if no run that was left both fits and is below the cutoff.
    """

    bound_s: float
    counts: tuple[int, ...] = ()
    micro_batches: int | None = None
    relaxed: RelaxedRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxRun:
    """A task that relaxes the next run of a (mesh, checkpointing) pair that may fit and may be below the cutoff.

    Attributes:
        mesh_bound: the lower bounds on the mesh.
        ac: checkpointing mode.
        counts: numbers of micro-batches of the runs that are not relaxed yet, each dividing the next.
        bound_s: lower bound in seconds on the step time of these runs.
        cutoff_s: step time in seconds at or above which a plan is not wanted.
    """

    mesh_bound: MeshBound
    ac: str
    counts: tuple[int, ...]
    bound_s: float
    cutoff_s: float

    def __call__(self, context: WorkerContext, constraints: SearchConstraints) -> RelaxedPair:
        """Return the bounds of the pair."""
        planner, mesh, bound_s = context.planner, self.mesh_bound.mesh, self.bound_s
        for index, count in enumerate(self.counts):
            run = planner.run_of(mesh, count, self.ac)
            if planner.least_memory_bytes(run) > constraints.memory_bytes or not constraints.allows(run):
                continue
            bound_s = max(bound_s, compute_bound_s(planner, run))
            if bound_s >= self.cutoff_s:
                return RelaxedPair(bound_s=bound_s)
            relaxed = planner.relax_run(
                run,
                constraints.restrict(mesh),
                self.mesh_bound,
                memory_bytes=constraints.memory_bytes,
                cutoff_s=self.cutoff_s,
            )
            if relaxed is None:
                return RelaxedPair(bound_s=self.cutoff_s)
            return RelaxedPair(
                bound_s=max(bound_s, relaxed.uncapped_s),
                counts=self.counts[index + 1 :],
                micro_batches=count,
                relaxed=relaxed,
            )
        return RelaxedPair(bound_s=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveRun:
    """A task that solves a run.

    Attributes:
        ac: checkpointing mode.
        mesh_bound: lower bounds on the mesh; None: not known.
        cutoff_s: step time in seconds at or above which a plan is not wanted.
        mip_gap: relative gap at which the solver may stop; None: the job's gap.
        left_s: seconds after which the solver returns its incumbent; None: no limit.
        least_solve_s: seconds that the solver gets even if ``left_s`` leaves it less.
        node_limit: nodes of the solver's branch and bound after which it returns its incumbent; None: no limit.
    """

    mesh: MeshSpec
    micro_batches: int
    ac: str
    mesh_bound: MeshBound | None = None
    cutoff_s: float = math.inf
    mip_gap: float | None = None
    left_s: float | None = None
    least_solve_s: float = 0.0
    node_limit: int | None = None

    def __call__(self, context: WorkerContext, constraints: SearchConstraints) -> SolvedRun | SolverError | None:
        """Return the best plan; None if no plan that fits is below the cutoff; an error if the solver has no answer."""
        planner = context.planner
        run = planner.run_of(self.mesh, self.micro_batches, self.ac)
        if not constraints.allows(run):
            return None
        try:
            candidate = planner.solve(
                run,
                constraints.restrict(self.mesh),
                memory_bytes=constraints.memory_bytes,
                cutoff_s=self.cutoff_s,
                mesh_bound=self.mesh_bound,
                mip_gap=self.mip_gap,
                deadline=None if self.left_s is None else time.perf_counter() + self.left_s,
                least_solve_s=self.least_solve_s,
                node_limit=self.node_limit,
            )
        except SolverError as error:
            return error
        return SolvedRun.from_candidate(candidate)
