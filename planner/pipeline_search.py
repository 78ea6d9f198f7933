"""Over the pipelines of a job: stages, their meshes, micro-batches, checkpointing, splits of the blocks.

Stages are planned one by one (`planner.stages`), each as `Search` plans a model. Of pipelines those with the lowest
bound go next. A pipeline's first bound is its compute, perfectly split, with the idle time of 1F1B; the second the
relaxation of its most frequent stage in one micro-batch, without a cap on memory, which holds for every number of
micro-batches and mode of checkpointing (`planner.floors`); the third that of the run itself, within the cap. Then its
stages are solved.

What is searched: a number of stages that divides the nodes, or the devices of a node; in a stage one axis, or a second
one within a node; the batch split evenly over the first axis; three ways to spread the blocks. What stages hand to each
other has one layout on both sides, split on the first axis by samples and on the second by anything or nothing.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cost_model.layout import Layout, MeshSpec
from planner.balance import balanced
from planner.baselines import Restriction
from planner.candidates import least_recompute_s, meshes_of, op_seconds
from planner.errors import SolverError
from planner.floors import Floor, floor_of
from planner.ilp import relax
from planner.regions import block_of
from planner.report import MeshOutcome, MeshReport
from planner.search import Candidate, Search
from planner.stage_searches import PipelineRun, PlannedPipeline, StageSearches, listed_blocks, stage_clusters
from planner.stages import Role, StageKind, kinds_of, least_step_s, pipeline_step_s, stage_limit_s

MOST_STAGES = 64

_LIGHTER = 2.0
"""By how many blocks the first stage is given less in one of the ways to spread them: it keeps most activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piped:
    """What came of a search of pipelines.

    Attributes:
        plan: the best that is faster than was asked for; None where there is none.
        bound_s: no pipeline that was searched is faster.
        complete: whether the search ended by itself; otherwise its time was up.
        meshes: what became of each.
    """

    plan: PlannedPipeline | None
    bound_s: float
    complete: bool
    meshes: tuple[MeshReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A pipeline that is still to be solved; ``looks`` at it so far have raised its bound."""

    pipeline: PipelineRun
    bound_s: float
    looks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Seconds of the whole batch on one device: of a block, of what comes before and after all blocks, and of running
    a block again, by mode of checkpointing."""

    block_s: float
    first_s: float
    last_s: float
    again_s: Mapping[str, float]

    def of(self, kind: StageKind, ac: str) -> float:
        """Return the seconds of a stage."""
        around = {"first": self.first_s, "last": self.last_s, "middle": 0.0}[kind.role]
        return around + kind.blocks * (self.block_s + self.again_s[ac])


@dataclass(slots=True)
class PipelineSearch:
    """One walk over the pipelines of a job whose model has no `planner.cut.obstacle`.

    Attributes:
        search: of the whole model on the whole cluster.
        counts: numbers of micro-batches to choose from.
        modes: of checkpointing.
        restrict: what pins leave to choose on a stage's mesh.
    """

    search: Search
    counts: Sequence[int]
    modes: Sequence[str]
    restrict: Callable[[MeshSpec], Restriction | None]
    progress: Callable[[str], None] | None = None
    deadline: float | None = None
    _best: PlannedPipeline | None = None
    _at_most_s: float = math.inf
    _proved_s: float = math.inf
    _unsolved: bool = False
    _work: _Work = field(init=False)
    _stages: StageSearches = field(init=False)
    _floors: dict[tuple[Role, int, MeshSpec], tuple[int, Floor | None]] = field(default_factory=dict)
    _seen: dict[MeshSpec, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        most = min(len(listed_blocks(self.search)), MOST_STAGES)
        self._work = self._measured()
        self._stages = StageSearches(self.search, self.restrict, dict(stage_clusters(self.search.cluster, most)))

    def best(self, at_most_s: float = math.inf) -> Piped:
        """Return the fastest pipeline that takes less than ``at_most_s`` seconds a step."""
        self._at_most_s = at_most_s
        items = list(self._items())
        self._dive(items)
        numbers = itertools.count()
        heap = [(item.bound_s, next(numbers), item) for item in items]
        heapq.heapify(heap)
        while heap and heap[0][0] < self._at_most_s and not self._is_over:
            item = heapq.heappop(heap)[2]
            raised = (self._by_floor, self._by_relaxation, self._solved)[item.looks](item)
            if raised is not None:
                heapq.heappush(heap, (raised.bound_s, next(numbers), raised))
        for bound_s, _, item in heap:
            self._note(item.pipeline, bound_s)
        left_s = min((bound_s for bound_s, _, _ in heap), default=math.inf)
        return Piped(
            plan=self._best,
            bound_s=min(left_s, self._proved_s, self._at_most_s),
            complete=left_s >= self._at_most_s and not (self._unsolved and self._is_over),
            meshes=tuple(self._reports()),
        )

    @property
    def _is_over(self) -> bool:
        return self.deadline is not None and time.perf_counter() >= self.deadline

    # --- what is searched ----------------------------------------------------------------------------------------

    def _items(self) -> Iterator[_Item]:
        """Yield every pipeline with its first bound."""
        length = len(listed_blocks(self.search))
        first, last = self._work.first_s / self._work.block_s, self._work.last_s / self._work.block_s
        for stages, cluster in self._stages.clusters.items():
            meshes = [mesh for mesh in meshes_of(cluster) if math.prod(mesh.shape[1:]) <= cluster.devices_per_node]
            around = ((first, last), (0.0, 0.0), (first + _LIGHTER, last))
            splits = [balanced(length, stages, *extra) for extra in around]
            for mesh, split, count, ac in itertools.product(meshes, dict.fromkeys(splits), self.counts, self.modes):
                if self.search.batch // count % mesh.shape[0] == 0:
                    pipeline = PipelineRun(mesh=mesh, counts=split, micro_batches=count, ac=ac)
                    yield _Item(pipeline=pipeline, bound_s=least_step_s(self._bounds(pipeline), count))

    def _measured(self) -> _Work:
        """Return the work of the largest micro-batch, unsplit: smaller ones fill a device no better."""
        search, one = self.search, MeshSpec(axes=(("dp", 1),))
        run = search.run_of(one, self.counts[0], "none")
        batch, listed = search.micro_batch(run), set(listed_blocks(search))
        graph = search.traced.graph_at(batch)
        blocks_s = first_s = last_s = 0.0
        seconds = op_seconds(search.traced, search.op_times, run, batch)
        for op in graph.ops:
            if block_of(graph.calls[op.call].fqn) in listed:
                blocks_s += seconds.get(op.name, 0.0)
            elif blocks_s:
                last_s += seconds.get(op.name, 0.0)
            else:
                first_s += seconds.get(op.name, 0.0)
        again_s = {
            ac: least_recompute_s(search.traced, search.op_times, search.run_of(one, self.counts[0], ac), batch)
            / len(listed)
            for ac in self.modes
        }
        parts = self.counts[0]
        return _Work(
            block_s=blocks_s * parts / len(listed), first_s=first_s * parts, last_s=last_s * parts, again_s=again_s
        )

    def _dive(self, items: Sequence[_Item]) -> None:
        """Find a first plan where that is cheap, to give the others something to beat: most stages, a node wide."""
        sizes = [(len(item.pipeline.counts), math.prod(item.pipeline.mesh.shape[1:])) for item in items]
        most = max(sizes, default=(0, 0))
        deepest = [item for item, size in zip(items, sizes, strict=True) if size == most]
        tried: set[str] = set()
        for item in sorted(deepest, key=lambda item: item.bound_s):
            pipeline = item.pipeline
            if self._best is None and pipeline.ac not in tried and item.bound_s < self._at_most_s and not self._is_over:
                tried.add(pipeline.ac)
                if self._may_fit(pipeline):
                    self._solved(item)

    # --- what nothing can beat -----------------------------------------------------------------------------------

    def _bounds(self, pipeline: PipelineRun) -> list[float]:
        """Return what each stage computes at least, as one of equals."""
        passes = pipeline.micro_batches + len(pipeline.counts) - 1
        share = passes / pipeline.micro_batches / pipeline.mesh.size
        bounds = [0.0] * len(pipeline.counts)
        for kind in kinds_of(pipeline.counts):
            for index in kind.indices:
                bounds[index] = self._work.of(kind, pipeline.ac) * share
        return bounds

    def _by_floor(self, item: _Item) -> _Item | None:
        """Raise the bound by the floor of the most frequent stage; None where some stage cannot fit."""
        pipeline, bounds = item.pipeline, self._bounds(item.pipeline)
        kind, stages = kinds_of(pipeline.counts)[0], len(pipeline.counts)
        if not self._may_fit(pipeline):
            self._note(pipeline, math.inf)
            return None
        floor_s = self._floor_s(kind, pipeline)
        if floor_s is None:
            return None
        again_s = kind.blocks * self._work.again_s[pipeline.ac] / pipeline.mesh.size
        idle_s = (stages - 1) * self._work.of(kind, pipeline.ac) / pipeline.mesh.size / pipeline.micro_batches
        for index in kind.indices:
            bounds[index] = max(bounds[index], floor_s + again_s + idle_s)
        bound_s = max(item.bound_s, least_step_s(bounds, pipeline.micro_batches))
        return _Item(pipeline=pipeline, bound_s=bound_s, looks=1)

    def _may_fit(self, pipeline: PipelineRun) -> bool:
        """Tell whether no stage needs too much memory by count of its tensors alone, however they are split."""
        for kind in kinds_of(pipeline.counts):
            search = self._stages.of(kind, len(pipeline.counts))
            run = self._stages.run(search, kind, pipeline)
            # What is known of the largest micro-batch tells of all others.
            search.least_memory_bytes(dataclasses.replace(run, micro_batches=self.counts[0]))
            if search.least_memory_bytes(run) > search.memory_bytes:
                return False
        return True

    def _floor_s(self, kind: StageKind, pipeline: PipelineRun) -> float | None:
        """Return what no run of a stage on its mesh can beat, its idle time left out; None where it has no layout.

        It is found for one number of blocks: with fewer it shrinks by no more than they do, with more it grows.
        """
        key = kind.role, len(pipeline.counts), pipeline.mesh
        if key not in self._floors:
            self._say(f"bounding a stage on mesh {pipeline.whole_mesh}")
            search = self._stages.of(kind, len(pipeline.counts))
            run = search.run_of(pipeline.mesh, self.counts[0], "none")
            formulation = search.formulate(run, self._stages.restriction(search, run, None))[2]
            with search.clock.stage("solve_s"):
                floor = None if formulation is None else floor_of(pipeline.mesh, formulation)
            self._floors[key] = kind.blocks, floor
        blocks, floor = self._floors[key]
        return None if floor is None else floor.bound_s * min(kind.blocks / blocks, 1.0)

    def _by_relaxation(self, item: _Item) -> _Item | None:
        """Raise the bound by the relaxation of each kind of stage within the cap; None where none fits or is wanted."""
        bounds = self._relaxed(item.pipeline, None)
        if bounds is None:
            return None
        bound_s = max(item.bound_s, least_step_s(bounds, item.pipeline.micro_batches))
        return _Item(pipeline=item.pipeline, bound_s=bound_s, looks=2)

    def _relaxed(self, pipeline: PipelineRun, layout: Layout | None) -> list[float] | None:
        """Return what no stage can beat, as one of equals; None where a stage does not fit, or is too slow."""
        bounds = self._bounds(pipeline)
        for kind in kinds_of(pipeline.counts):
            limit_s = stage_limit_s(bounds, kind, pipeline.micro_batches, self._at_most_s)
            bound_s = self._relaxed_stage(kind, pipeline, layout, limit_s)
            if bound_s is None:
                self._note(pipeline, self._at_most_s)
                return None
            for index in kind.indices:
                bounds[index] = max(bounds[index], bound_s)
            if least_step_s(bounds, pipeline.micro_batches) >= self._at_most_s:
                self._note(pipeline, self._at_most_s)
                return None
        return bounds

    def _relaxed_stage(
        self, kind: StageKind, pipeline: PipelineRun, layout: Layout | None, limit_s: float
    ) -> float | None:
        search = self._stages.of(kind, len(pipeline.counts))
        run, floor = self._stages.run(search, kind, pipeline), self._known_floor(kind, pipeline)
        at_most_s = None if math.isinf(limit_s) else limit_s
        formulation = search.formulate(run, self._stages.restriction(search, run, layout), floor, at_most_s)[2]
        if formulation is None:
            return None
        with search.clock.stage("solve_s"):
            try:
                relaxed = relax(formulation.problem, memory_bytes=search.memory_bytes)
            except SolverError:  # ended without an answer
                relaxed = relax(formulation.problem)
        return None if relaxed is None else relaxed.bound_s

    def _known_floor(self, kind: StageKind, pipeline: PipelineRun) -> Floor | None:
        """Return a floor that holds for a kind of stage."""
        blocks, floor = self._floors.get((kind.role, len(pipeline.counts), pipeline.mesh), (0, None))
        return floor if kind.blocks >= blocks else None

    # --- solving -------------------------------------------------------------------------------------------------

    def _solved(self, item: _Item) -> None:
        """Plan the stages of a pipeline, in each layout that they can hand tensors on in."""
        pipeline = item.pipeline
        search = self._stages.of(kinds_of(pipeline.counts)[0], len(pipeline.counts))
        for layout in self._stages.layouts(search, pipeline.mesh, search.batch // pipeline.micro_batches):
            bounds = self._relaxed(pipeline, layout)
            if bounds is None:
                continue
            self._say(
                f"solving mesh {pipeline.whole_mesh}, {pipeline.micro_batches} micro-batches, "
                f"checkpointing {pipeline.ac}"
            )
            try:
                found = self._planned(pipeline, layout, bounds)
            except SolverError:
                # It broke off, or time was up: what it could reach is left in the gap.
                found, self._unsolved = None, True
                self._proved_s = min(self._proved_s, least_step_s(bounds, pipeline.micro_batches))
            if found is None:
                continue
            bound_s = least_step_s(bounds, pipeline.micro_batches)
            self._proved_s = min(self._proved_s, bound_s)
            self._note(pipeline, bound_s, found.step_time_s)
            if found.step_time_s < self._at_most_s:
                self._keep(found)

    def _planned(self, pipeline: PipelineRun, layout: Layout, bounds: list[float]) -> PlannedPipeline | None:
        """Return the stages' plans; None where one does not fit or is too slow. Raises ``bounds`` to what is proved."""
        found: list[tuple[StageKind, Candidate]] = []
        for kind in kinds_of(pipeline.counts):
            search = self._stages.of(kind, len(pipeline.counts))
            run = self._stages.run(search, kind, pipeline)
            limit_s = stage_limit_s(bounds, kind, pipeline.micro_batches, self._at_most_s)
            candidate = search.solve(
                run,
                self._stages.restriction(search, run, layout),
                None if math.isinf(limit_s) else limit_s,
                self._known_floor(kind, pipeline),
                deadline=self.deadline,
            )
            if candidate is None or candidate.solution is None:
                self._note(pipeline, self._at_most_s)
                return None
            found.append((kind, candidate))
            for index in kind.indices:
                bounds[index] = max(bounds[index], candidate.solution.bound_s)
        plan = PlannedPipeline(pipeline=pipeline, layout=layout, kinds=tuple(found), step_time_s=0.0)
        step_s = pipeline_step_s([stage.estimate for stage in plan.stages()], pipeline.micro_batches)
        return dataclasses.replace(plan, step_time_s=step_s)

    def _keep(self, found: PlannedPipeline) -> None:
        self._best = found
        self._at_most_s = found.step_time_s * (1.0 - self.search.job.mip_gap)
        self._say(f"best so far {found.step_time_s:.6g} s")

    # --- what became of it ---------------------------------------------------------------------------------------

    def _note(self, pipeline: PipelineRun, at_least_s: float, step_time_s: float | None = None) -> None:
        """Note what was found of a mesh, or what nothing on it can beat."""
        least_s, found_s = self._seen.get(pipeline.whole_mesh, (math.inf, math.inf))
        found_s = min(found_s, math.inf if step_time_s is None else step_time_s)
        self._seen[pipeline.whole_mesh] = min(least_s, at_least_s, found_s), found_s

    def _reports(self) -> Iterator[MeshReport]:
        for mesh, (least_s, found_s) in self._seen.items():
            fits: MeshOutcome = "slower" if least_s >= self._at_most_s else "open"
            yield MeshReport(
                mesh=str(mesh),
                outcome="does-not-fit" if math.isinf(least_s) else fits,
                at_least_s=None if math.isinf(least_s) else least_s,
                step_time_s=None if math.isinf(found_s) else found_s,
            )

    def _say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what)
