"""The search over meshes, checkpointing modes and numbers of micro-batches: an instance of `branch_and_bound`.

Three kinds of nodes, each the child of the one before:

- a mesh, bounded by its compute, perfectly split. Expanding it relaxes its run in the fewest micro-batches
  (`mesh_bound`).
- a (mesh, checkpointing) pair: its runs that are not relaxed yet, in ascending numbers of micro-batches. More
  micro-batches never make a step faster, except that they free memory for faster layouts. So a run's relaxation without
  the memory cap bounds all runs in more micro-batches. Expanding the pair relaxes its next run.
- a run, bounded by its relaxation within the memory cap. Expanding it solves its integer program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from cost_model.layouts.layout import MeshSpec
from planner.errors import SolverError
from planner.graph.trace_module import divisor_chains
from planner.plan.estimate import MeshReport
from planner.progress import IncumbentFound, MeshBounding, RunRelaxing, RunSolving
from planner.run.mesh_bound import MeshBound
from planner.run.run_results import Candidate, SolvedRun
from planner.search.branch_and_bound import (
    BranchAndBound,
    Expansion,
    Incumbent,
    SearchResult,
    SearchSpec,
    Task,
    run_searches,
)
from planner.search.mesh_tasks import BoundedMesh, BoundMesh, RelaxedPair, RelaxRun, SolveRun, compute_bound_s
from planner.search.task_pool import Pool

_FIRST_PLAN_GAP = 0.1
"""Relative gap to which the first plan is solved, which only has to prune nodes."""

_FIRST_PLAN_S = 3.0
"""Seconds that the solver gets for the first plan even if the deadline is nearer: formulating is most of the work."""

_FITS_EASILY = 2.0
"""A run whose least memory times this is within the cap is expected to fit."""

_TRIAL_NODES = 30
"""Nodes of the solver's branch and bound when a run is first solved. They often give an incumbent that prunes other
nodes of the search. To prove that it is the best plan of its run can take many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeshNode:
    """A mesh that is bounded by its compute alone.

    Attributes:
        number: position of the mesh among all meshes, from 1.
        bound_s: lower bound in seconds on the step time of every plan on the mesh.
    """

    mesh: MeshSpec
    number: int
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairNode:
    """A (mesh, checkpointing) pair: its runs that are not relaxed yet.

    Attributes:
        ac: checkpointing mode.
        counts: numbers of micro-batches of these runs, each dividing the next.
        bound_s: lower bound in seconds on the step time of these runs.
    """

    mesh_bound: MeshBound
    ac: str
    counts: tuple[int, ...]
    bound_s: float

    @property
    def mesh(self) -> MeshSpec:
        return self.mesh_bound.mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunNode:
    """A run that is not solved yet.

    Attributes:
        is_tried: whether the run was solved with `_TRIAL_NODES` nodes, which were not enough.
    """

    pair: _PairNode
    micro_batches: int
    bound_s: float
    is_tried: bool = False

    @property
    def mesh(self) -> MeshSpec:
        return self.pair.mesh


_Node = _MeshNode | _PairNode | _RunNode


class MeshSearch(BranchAndBound[_Node]):
    """The search over the meshes of a job."""

    def __init__(self, spec: SearchSpec, incumbent: Incumbent) -> None:
        super().__init__(spec, incumbent)
        self._planner = spec.planner
        self._best: SolvedRun | None = None
        self._meshes: Sequence[MeshSpec] = ()
        self._solver_error: SolverError | None = None

    def best(self, meshes: Sequence[MeshSpec]) -> SearchResult[Candidate]:
        """Return the fastest plan on ``meshes``.

        Raises:
            SolverError: time was up before any plan was found.
        """
        counts, modes = self.spec.micro_batch_counts, self.spec.modes
        if len(meshes) == len(counts) == len(modes) == 1:
            return self._solve_only_run(meshes[0])
        self.start(meshes)
        run_searches(self.spec.pool, [self])
        return self.result()

    def start(self, meshes: Sequence[MeshSpec]) -> None:
        """Find a first plan, and push every mesh."""
        self._meshes = meshes
        # The first tasks run in this process, so that its caches are filled before they are sent to workers. Meshes
        # of one axis come first: they have few choices, and their plans prune other meshes.
        here = self.spec.pool.in_this_process()
        one_axis = [mesh for mesh in meshes if len(mesh.shape) == 1 and self._splits_batch(mesh)]
        other_meshes = [mesh for mesh in meshes if mesh not in one_axis]
        self._push_meshes(one_axis)
        run_searches(here, [self])
        if self._best is None and other_meshes:
            self._find_first_plan(min(other_meshes, key=self._distance_from_usual), here)
        self._push_meshes(other_meshes)
        self.has_all_roots = True

    def _splits_batch(self, mesh: MeshSpec) -> bool:
        """Return whether all devices of a mesh together divide the micro-batch, for some number of micro-batches."""
        return any(self._planner.batch // count % mesh.size == 0 for count in self.spec.micro_batch_counts)

    def _distance_from_usual(self, mesh: MeshSpec) -> float:
        """Return the distance, in powers of two, of the innermost axis from the usual size: the devices of a node."""
        return abs(math.log2(mesh.shape[-1] / self._planner.cluster.devices_per_node))

    def _find_first_plan(self, mesh: MeshSpec, here: Pool) -> None:
        """Solve a run that probably fits.

        It is the one in the largest micro-batches that the outer axis divides, without checkpointing, where that needs
        little of the memory; or else the one with the least memory. The first is often the fastest on its mesh, so that
        it is solved exactly if there is no other.
        """
        if self.is_over:
            return
        counts, modes = self.spec.micro_batch_counts, self.spec.modes
        splitting = [count for count in counts if self._planner.batch // count % mesh.shape[0] == 0] or [counts[-1]]
        lightest = self._planner.run_of(mesh, splitting[0], modes[0])
        fits_easily = _FITS_EASILY * self._planner.least_memory_bytes(lightest) <= self.spec.constraints.memory_bytes
        task = SolveRun(
            mesh=mesh,
            micro_batches=splitting[0] if fits_easily else splitting[-1],
            ac=modes[0] if fits_easily else modes[-1],
            mip_gap=None if fits_easily and len(self._meshes) == 1 else _FIRST_PLAN_GAP,
            left_s=self.spec.left_s,
            least_solve_s=_FIRST_PLAN_S,
        )
        self._report_solving(task, is_first_plan=True)
        solved = here.run_one(task, self.spec.constraints)
        if isinstance(solved, SolvedRun):  # without a plan the search goes on, if there is time
            self._take_plan(solved)

    def _solve_only_run(self, mesh: MeshSpec) -> SearchResult[Candidate]:
        """Return the result of a search space of one run, which needs no bounds."""
        constraints = self.spec.constraints
        run = self._planner.run_of(mesh, self.spec.micro_batch_counts[0], self.spec.modes[0])
        if not constraints.allows(run):
            return SearchResult(plan=None, bound_s=math.inf, complete=True)
        self._report_solving(SolveRun(mesh=mesh, micro_batches=run.micro_batches, ac=run.ac))
        candidate = self._planner.solve(
            run, constraints.restrict(mesh), memory_bytes=constraints.memory_bytes, deadline=self.spec.deadline
        )
        if candidate is None or candidate.solution is None:
            return SearchResult(plan=None, bound_s=math.inf, complete=True)
        is_optimal = candidate.solution.status == "optimal"
        return SearchResult(plan=candidate, bound_s=candidate.solution.bound_s, complete=is_optimal)

    def _push_meshes(self, meshes: Sequence[MeshSpec]) -> None:
        for mesh in meshes:
            bound_s = compute_bound_s(
                self._planner, self._planner.run_of(mesh, self.spec.micro_batch_counts[0], "none")
            )
            self.push(_MeshNode(mesh=mesh, number=self._meshes.index(mesh) + 1, bound_s=bound_s))

    # --- what expands a node -------------------------------------------------------------------------------------

    def expand(self, node: _Node) -> Expansion[_Node]:
        """Return the task that expands a node."""
        return Expansion(node=node, key=id(node), state_task=functools.partial(self._task, node))

    def _task(self, node: _Node) -> Task:
        cutoff_s = self.incumbent.cutoff_s
        if isinstance(node, _MeshNode):
            self.report(
                lambda state: MeshBounding(
                    mesh=str(node.mesh), mesh_number=node.number, meshes=len(self._meshes), state=state
                )
            )
            return BoundMesh(mesh=node.mesh, counts=tuple(self.spec.micro_batch_counts), modes=tuple(self.spec.modes))
        if isinstance(node, _PairNode):
            self.report(
                lambda state: RunRelaxing(mesh=str(node.mesh), micro_batches=node.counts[0], ac=node.ac, state=state)
            )
            return RelaxRun(
                mesh_bound=node.mesh_bound, ac=node.ac, counts=node.counts, bound_s=node.bound_s, cutoff_s=cutoff_s
            )
        task = SolveRun(
            mesh=node.mesh,
            micro_batches=node.micro_batches,
            ac=node.pair.ac,
            mesh_bound=node.pair.mesh_bound,
            cutoff_s=cutoff_s,
            left_s=self.spec.left_s,
            node_limit=None if node.is_tried else _TRIAL_NODES,
        )
        self._report_solving(task)
        return task

    def _report_solving(self, task: SolveRun, *, is_first_plan: bool | None = None) -> None:
        self.report(
            lambda state: RunSolving(
                mesh=str(task.mesh),
                micro_batches=task.micro_batches,
                ac=task.ac,
                is_first_plan=is_first_plan,
                state=state,
            )
        )

    # --- what follows from its result ----------------------------------------------------------------------------

    def take_result(
        self,
        node: _Node,
        key: Hashable,
        task: object,
        result: BoundedMesh | RelaxedPair | SolvedRun | SolverError | None,
    ) -> None:
        """Push the children of a node, or record its plan."""
        if isinstance(node, _MeshNode):
            assert isinstance(result, BoundedMesh)
            self._branch_into_pairs(node.mesh, result)
        elif isinstance(node, _PairNode):
            assert isinstance(result, RelaxedPair)
            self._branch_into_runs(node, result)
        else:
            assert isinstance(task, SolveRun)
            assert not isinstance(result, BoundedMesh | RelaxedPair)
            self._close_run(node, task, result)

    def _branch_into_pairs(self, mesh: MeshSpec, bounded: BoundedMesh) -> None:
        self.record(mesh).has_layout = bounded.has_layout
        if bounded.mesh_bound is None:
            return
        for ac, bound_s in bounded.bounds_s.items():
            for counts in divisor_chains(self.spec.micro_batch_counts):
                self.push(_PairNode(mesh_bound=bounded.mesh_bound, ac=ac, counts=counts, bound_s=bound_s))

    def _branch_into_runs(self, pair: _PairNode, result: RelaxedPair) -> None:
        """Push the run that was relaxed, and the pair with the runs that are left."""
        record, relaxed, cutoff_s = self.record(pair.mesh), result.relaxed, self.incumbent.cutoff_s
        if relaxed is None or result.micro_batches is None:
            record.close(result.bound_s)
            return
        if relaxed.capped_s is not None and relaxed.capped_s < cutoff_s:
            # It is expanded first: a few nodes of its program may give an incumbent that prunes all other nodes.
            run = _RunNode(pair=pair, micro_batches=result.micro_batches, bound_s=relaxed.capped_s)
            self.push(run, first=True)
        else:
            record.close(cutoff_s)  # some plans of the run may fit, but none of them is below the cutoff
        if result.counts:
            self.push(dataclasses.replace(pair, counts=result.counts, bound_s=result.bound_s))

    def _close_run(self, node: _RunNode, task: SolveRun, result: SolvedRun | SolverError | None) -> None:
        """Close a run that was solved, or push it again if a trial was not enough."""
        record = self.record(node.mesh)
        if isinstance(result, SolverError) and self.is_over:
            self.push(node)
            self.gave_up = True
        elif isinstance(result, SolverError):
            # The solver broke off. Other nodes may still be solved. The bound of this run stays in the final bound.
            self._solver_error, self.gave_up = result, True
            self.close(node.bound_s)
            record.close(node.bound_s)
        elif task.node_limit is not None and (result is None or result.solution.hit_limit):
            bound_s = node.bound_s if result is None else max(node.bound_s, result.solution.bound_s)
            self.push(dataclasses.replace(node, bound_s=bound_s, is_tried=True))
            if result is not None:
                self._take_plan(result)
        elif result is None:
            record.close(max(node.bound_s, task.cutoff_s))  # plans that fit may exist, but none is below the cutoff
        else:
            self.gave_up |= result.solution.hit_limit
            self.close(result.solution.bound_s)
            record.close(result.solution.bound_s)
            self._take_plan(result)

    def _take_plan(self, solved: SolvedRun) -> None:
        """Record a plan. It becomes the best plan of this search if it is the fastest so far."""
        record, step_time_s = self.record(solved.run.mesh), solved.estimate.step_time_s
        record.best_s = min(record.best_s, step_time_s)
        if self._best is None or step_time_s < self._best.estimate.step_time_s:
            self._best = solved
            if self.incumbent.improve(step_time_s):
                self.report(lambda state: IncumbentFound(mesh=str(solved.run.mesh), state=state))

    def result(self) -> SearchResult[Candidate]:
        """Return the outcome once the search has ended.

        Raises:
            SolverError: time was up before any plan was found, by this search or one that shares its incumbent.
        """
        if math.isinf(self.incumbent.cutoff_s):
            if self._solver_error is not None:
                raise self._solver_error
            if self.nodes_open:
                raise SolverError("time was up before any plan was found.", what_to_do="Allow a longer search.")
            return SearchResult(plan=None, bound_s=math.inf, complete=True)
        reports: tuple[MeshReport, ...] = ()
        if len(self._meshes) > 1:
            self.close_open_nodes()
            chosen = None if self._best is None else self._best.run.mesh
            reports = tuple(self.mesh_report(mesh, is_chosen=mesh == chosen) for mesh in self._meshes)
        candidate = None if self._best is None else self._planner.candidate(self._best)
        return SearchResult(plan=candidate, bound_s=self.bound_s, complete=self.is_complete, meshes=reports)
