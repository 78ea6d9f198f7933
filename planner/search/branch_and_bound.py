"""Best-first branch and bound over a shared incumbent: the engine of the searches over meshes and over pipelines.

A *node* is a set of plans with a lower bound on the step time of each. The roots are all meshes, or all pipelines,
bounded by their compute alone. A task *expands* a node: it bounds, relaxes or solves the plans of the node. The result
is child nodes, the same node with a higher bound, or a plan.

- *Incumbent*: the fastest plan so far. A plan is wanted only if its step time is below the *cutoff*: the incumbent's
  step time less the job's relative gap. Searches that run together share one incumbent.
- *Pruning*: a node whose lower bound reaches the cutoff is never expanded.
- *Best first*: of all searches that run together, the node with the lowest bound is expanded next.
- *In parallel*: a pool expands several nodes at once. A task gets the cutoff of the moment when it is picked. The
  cutoff may fall while the task runs. A lower cutoff only prunes more, so the task's result still holds.
- *End*: no open node is below the cutoff, or the deadline has passed.
- *Final bound*: no plan in the search space is faster. It is the lowest of the bounds of nodes that are still open, of
  the bounds that the solver proved for nodes that are closed, and of the cutoff, which bounds all pruned nodes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from cost_model.layouts.layout import MeshSpec
from planner.plan.estimate import MeshOutcome, MeshReport
from planner.progress import Progress, SearchEvent, SearchState
from planner.run.run_planner import RunPlanner
from planner.search.task_pool import Pool
from planner.search.worker_context import SearchConstraints, WorkerContext

Task = Callable[[WorkerContext, SearchConstraints], Any]
"""A task: it expands a node, in this process or in a worker."""


class Node(Protocol):
    """A set of plans on one mesh."""

    @property
    def bound_s(self) -> float:
        """A lower bound in seconds on the step time of every plan of the node."""

    @property
    def mesh(self) -> MeshSpec:
        """The mesh of the plans; for a pipeline, the mesh of all stages together."""


NodeT = TypeVar("NodeT", bound=Node)
PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """What a search is for, and how it runs.

    Attributes:
        context: the context of tasks that run in this process. It has the planner of runs.
        micro_batch_counts: numbers of micro-batches to choose from, ascending.
        modes: checkpointing modes to choose from, from the one that saves most to the one that saves least.
        constraints: the constraints on every plan.
        pool: runs the tasks, on ``context`` or on copies of it.
        deadline: time of `time.perf_counter` after which no task starts; None: no deadline.
        progress: called with each event; None: events are dropped.
    """

    context: WorkerContext
    micro_batch_counts: Sequence[int]
    modes: Sequence[str]
    constraints: SearchConstraints
    pool: Pool
    deadline: float | None = None
    progress: Progress | None = None

    @property
    def planner(self) -> RunPlanner:
        """The planner of runs."""
        return self.context.planner

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.perf_counter() >= self.deadline

    @property
    def left_s(self) -> float | None:
        """Seconds left until the deadline; None without one."""
        return None if self.deadline is None else max(self.deadline - time.perf_counter(), 0.0)


@dataclass(slots=True)
class Incumbent:
    """The step time of the best plan that any of the searches that share it has found.

    Attributes:
        mip_gap: fraction of the incumbent's step time that a plan has to save to be wanted.
        step_time_s: seconds; infinite if there is no plan yet.
        cutoff_s: step time in seconds at or above which a plan is not wanted; infinite if there is no plan yet.
        finished_bound_s: final bound of searches that have ended before; infinite if there were none.
        searches: the searches that share the incumbent.
    """

    mip_gap: float
    step_time_s: float = math.inf
    cutoff_s: float = math.inf
    finished_bound_s: float = math.inf
    searches: list[BranchAndBound[Any]] = field(default_factory=list)

    def improve(self, step_time_s: float) -> bool:
        """Return whether a plan with this step time becomes the incumbent, and lower the cutoff if so."""
        is_best = step_time_s < self.step_time_s
        self.step_time_s = min(self.step_time_s, step_time_s)
        self.cutoff_s = min(self.cutoff_s, step_time_s * (1.0 - self.mip_gap))
        return is_best

    @property
    def state(self) -> SearchState:
        """The joint progress of all searches that share the incumbent."""
        is_bounded = all(search.has_all_roots for search in self.searches)
        bound_s = min((search.bound_s for search in self.searches), default=0.0)
        return SearchState(
            step_time_s=self.step_time_s if math.isfinite(self.step_time_s) else None,
            bound_s=min(bound_s, self.finished_bound_s) if is_bounded and math.isfinite(bound_s) else None,
            tasks_done=sum(search.tasks_done for search in self.searches),
            nodes_open=sum(search.nodes_open for search in self.searches),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Generic[PlanT]):
    """The outcome of a search.

    Attributes:
        plan: the best plan; None if no plan was found below the cutoff.
        bound_s: lower bound in seconds on the step time of every plan in the search space.
        complete: whether every node was solved or pruned; otherwise time was up, or the solver gave no answer.
        meshes: the outcome of each mesh.
    """

    plan: PlanT | None
    bound_s: float
    complete: bool
    meshes: tuple[MeshReport, ...] = ()


@dataclass(slots=True)
class MeshRecord:
    """The results for one mesh so far.

    Attributes:
        bound_s: lowest bound of the closed nodes of the mesh; infinite if no plan of these nodes fits.
        best_s: step time of the best plan on the mesh; infinite if no plan was found.
        has_layout: whether the model has any layout on the mesh.
    """

    bound_s: float = math.inf
    best_s: float = math.inf
    has_layout: bool = True

    def close(self, bound_s: float) -> None:
        """Record the bound of a node of the mesh that is not expanded further."""
        self.bound_s = min(self.bound_s, bound_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion(Generic[NodeT]):
    """The task that a node waits for.

    Attributes:
        node: the waiting node; its bound may be higher than when it was picked.
        key: identifies the task: nodes with the same key wait for the same result.
        state_task: returns the task. It is called only if no other node waits for the task already.
    """

    node: NodeT
    key: Hashable
    state_task: Callable[[], Task]


class BranchAndBound(ABC, Generic[NodeT]):
    """One search: its open nodes, the tasks that expand them, and the proved bounds. See the module's docstring."""

    def __init__(self, spec: SearchSpec, incumbent: Incumbent) -> None:
        self.spec, self.incumbent = spec, incumbent
        self.has_all_roots = False
        self.tasks_done = 0
        self.gave_up = False
        """Whether some node was not solved because time was up or the solver gave no answer."""
        self._heap: list[tuple[float, int, NodeT]] = []
        self._numbers = itertools.count()
        self._waiting: dict[Hashable, list[NodeT]] = {}
        self._solver_bound_s = math.inf
        """Lowest bound that the solver proved for the nodes that were closed."""
        self._records: dict[MeshSpec, MeshRecord] = {}
        incumbent.searches.append(self)

    # --- what a subclass defines -------------------------------------------------------------------------------

    @abstractmethod
    def expand(self, node: NodeT) -> Expansion[NodeT] | None:
        """Return the task that expands a node; None if the node needs no task, and was closed or pushed again."""

    @abstractmethod
    def take_result(self, node: NodeT, key: Hashable, task: Any, result: Any) -> None:
        """Push the nodes that follow from the result of the task that ``node`` waited for, or record its plan."""

    # --- the next task -----------------------------------------------------------------------------------------

    def push(self, node: NodeT, *, first: bool = False) -> None:
        """Add an open node. It is expanded in the order of its bound, or before all other nodes if ``first``."""
        heapq.heappush(self._heap, (-math.inf if first else node.bound_s, next(self._numbers), node))

    @property
    def is_over(self) -> bool:
        """Whether there is no time for another task."""
        return self.spec.is_over

    @property
    def next_bound_s(self) -> float:
        """The lowest bound of the open nodes in seconds; infinite if no node is below the cutoff, or time is up."""
        if not self._heap or self._heap[0][0] >= self.incumbent.cutoff_s or self.is_over:
            return math.inf
        return self._heap[0][0]

    def pick(self) -> tuple[Hashable, Task] | None:
        """Return the next task and its key; None if there is no task until a running one is done."""
        while self.next_bound_s < math.inf:
            expansion = self.expand(heapq.heappop(self._heap)[2])
            if expansion is None:
                continue
            is_new = expansion.key not in self._waiting
            self._waiting.setdefault(expansion.key, []).append(expansion.node)
            if is_new:
                return expansion.key, expansion.state_task()
        return None

    def done(self, key: Hashable, task: Any, result: Any) -> None:
        """Take the result of a task for all nodes that wait for it."""
        self.tasks_done += 1
        for node in self._waiting.pop(key):
            self.take_result(node, key, task, result)

    # --- results -----------------------------------------------------------------------------------------------

    def _open(self) -> Iterator[NodeT]:
        yield from (node for _, _, node in self._heap)
        yield from itertools.chain.from_iterable(self._waiting.values())

    @property
    def nodes_open(self) -> int:
        """The number of open nodes without those that wait for a task."""
        return len(self._heap)

    @property
    def bound_s(self) -> float:
        """A lower bound in seconds on all plans of the search space; valid once all roots are pushed."""
        open_s = min((node.bound_s for node in self._open()), default=math.inf)
        return min(open_s, self._solver_bound_s, self.incumbent.cutoff_s)

    @property
    def is_complete(self) -> bool:
        """Whether all open nodes are pruned, and no node was given up."""
        return not self.gave_up and all(node.bound_s >= self.incumbent.cutoff_s for node in self._open())

    def close(self, bound_s: float) -> None:
        """Record the bound that the solver proved for a node that is not expanded further."""
        self._solver_bound_s = min(self._solver_bound_s, bound_s)

    def record(self, mesh: MeshSpec) -> MeshRecord:
        """Return the record of a mesh, which is new at the first call."""
        return self._records.setdefault(mesh, MeshRecord())

    @property
    def meshes(self) -> Sequence[MeshSpec]:
        """The meshes that have a record, oldest record first."""
        return list(self._records)

    def close_open_nodes(self) -> None:
        """Record the bounds of open nodes for their meshes, at the end of the search."""
        for node in self._open():
            self.record(node.mesh).close(node.bound_s)

    def mesh_report(self, mesh: MeshSpec, *, is_chosen: bool = False) -> MeshReport:
        """Return the outcome of a mesh."""
        record = self.record(mesh)
        bound_s = min(record.bound_s, record.best_s)
        outcome: MeshOutcome = "slower" if bound_s >= self.incumbent.cutoff_s else "open"
        if is_chosen:
            outcome = "chosen"
        elif not record.has_layout:
            outcome = "no-layout"
        elif math.isinf(bound_s):
            outcome = "does-not-fit"
        return MeshReport(
            mesh=str(mesh),
            outcome=outcome,
            at_least_s=bound_s if math.isfinite(bound_s) else None,
            step_time_s=record.best_s if math.isfinite(record.best_s) else None,
        )

    def report(self, event: Callable[[SearchState], SearchEvent]) -> None:
        """Report the event that ``event`` returns, given the state of the search."""
        if self.spec.progress is not None:
            self.spec.progress(event(self.incumbent.state))


def run_searches(pool: Pool, searches: Sequence[BranchAndBound[Any]]) -> None:
    """Expand nodes of all ``searches``, the lowest bound first, until no open node is below the cutoff or time is up.

    The searches share their incumbent and their constraints.
    """

    def pick() -> tuple[tuple[BranchAndBound[Any], Hashable], Task] | None:
        for search in sorted(searches, key=lambda search: search.next_bound_s):
            picked = search.pick()
            if picked is not None:
                return (search, picked[0]), picked[1]
        return None

    def done(tag: tuple[BranchAndBound[Any], Hashable], task: Any, result: Any) -> None:
        search, key = tag
        search.done(key, task, result)

    pool.run(pick, done, searches[0].spec.constraints)
