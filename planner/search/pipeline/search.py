"""Over the pipelines of a job (`space`): stages, their meshes, micro-batches, checkpointing, splits.

Stages are planned one by one (`step_time`), each as `RunPlanner` plans a model. Of pipelines those with the lowest
bound go next. A pipeline's first bound is its compute, perfectly split, with the idle time of 1F1B, interleaved or not.
Then come looks at its stages (`bound_order`): what is found of a stage holds in every pipeline that has it.
Then its stages are solved.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cost_model import reserve_bytes
from cost_model.layouts.layout import MeshSpec
from planner.plan.estimate import MeshOutcome, MeshReport
from planner.run.run_planner import RunPlanner
from planner.search.pipeline.bound_order import (
    ALIKE,
    BoundingStep,
    StageKey,
    bounding_steps,
    in_one_piece,
    shared_limit_s,
)
from planner.search.pipeline.space import PipelineSpace
from planner.search.pipeline.stage_planners import PipelineRun, PlannedPipeline, StagePlanners
from planner.search.pipeline.step_time import StageKind, least_step_s, stage_limit_s
from planner.search.pipeline.tasks import (
    BlockMemory,
    BoundStage,
    PipelineResult,
    RelaxStage,
    SingleDeviceTime,
    SolvedPipeline,
    SolvePipeline,
    StageBound,
)
from planner.search.task_pool import Pool
from planner.search.worker_context import Restrict, SearchConstraints, WorkerContext

_FIRST_GAP = 0.1
"""How far from the best of its pipeline the first plan may be: it is only there to tell what is not worth a look."""

_WIDE = 8
"""Ranks of all axes of a stage but the first, at most, in the pipelines that are walked through first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSearchResult:
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
    """A pipeline that is still to be solved.

    Attributes:
        bounds: what each stage cannot beat, as one of equals; ``looks`` so far have raised them.
        is_tried: whether it was solved for a first plan, and may have a better one.
    """

    pipeline: PipelineRun
    bounds: tuple[float, ...]
    looks: int = 0
    is_tried: bool = False

    @property
    def bound_s(self) -> float:
        """What no step can beat."""
        return least_step_s(self.bounds, self.pipeline.micro_batches, self.pipeline.chunks)

    def raised(self, kind: StageKind, bound_s: float) -> _Item:
        """Return the item after another look, which found what no stage of ``kind`` can beat."""
        bounds = (max(b, bound_s) if index in kind.indices else b for index, b in enumerate(self.bounds))
        return dataclasses.replace(self, bounds=tuple(bounds), looks=self.looks + 1)


_Task = BoundStage | RelaxStage | SolvePipeline


@dataclass(slots=True)
class PipelineSearch:
    """One walk (`Walk`) over the pipelines of a job whose model has no `obstacle`.

    Attributes:
        search: of the whole model on the whole cluster.
        counts: numbers of micro-batches to choose from.
        modes: of checkpointing.
        restrict: what pins leave to choose on a stage's mesh.
        pool: does the tasks; None: this process does.
        only: the one number of stages, and their mesh, that is searched; None: all.
        axes: that the mesh of a stage has at most.
    """

    search: RunPlanner
    counts: Sequence[int]
    modes: Sequence[str]
    restrict: Restrict
    progress: Callable[[str], None] | None = None
    deadline: float | None = None
    pool: Pool | None = None
    only: tuple[int, MeshSpec] | None = None
    axes: int = 2
    _best: SolvedPipeline | None = None
    _at_most_s: float = math.inf
    _proved_s: float = math.inf
    _unsolved: bool = False
    _work: SingleDeviceTime = field(init=False)
    _bench: WorkerContext = field(init=False)
    _here: Pool = field(init=False)
    _space: PipelineSpace = field(init=False)
    _heap: list[tuple[float, int, _Item]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _known: dict[StageKey, StageBound | float] = field(default_factory=dict)
    _waiting: dict[StageKey, list[tuple[_Item, BoundingStep | None]]] = field(default_factory=dict)
    _blocks: dict[bool, BlockMemory] = field(default_factory=dict)
    _seen: dict[MeshSpec, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._work = SingleDeviceTime.of_model(self.search, self.counts[0], self.modes)
        self._bench = WorkerContext(self.search)
        terms = SearchConstraints(memory_bytes=self.search.memory_bytes, restrict=self.restrict)
        self._here = Pool(self._bench).under(terms)
        stages = self._stages
        self._space = PipelineSpace(
            self.search, self._work, stages.clusters, self.only, self.axes, stages.may_have_ends_alone()
        )

    @property
    def _stages(self) -> StagePlanners:
        return self._bench.stages

    def best(self, at_most_s: float = math.inf) -> PipelineSearchResult:
        """Return the fastest pipeline that takes less than ``at_most_s`` seconds a step."""
        self.start(at_most_s)
        self._pool.run(self.pick, self.done)
        return self.found()

    def start(self, at_most_s: float = math.inf) -> None:
        """Find what is to be walked over, and a first plan where one is likely."""
        self._at_most_s = at_most_s
        likely, others = self._likely_first(list(self._items()))
        for item in likely:
            self._push(item)
        self._pool.run(lambda: self.pick() if self._best is None else None, self.done)
        for item in others:
            self._push(item)

    @property
    def _pool(self) -> Pool:
        return self.pool or self._here

    def found(self) -> PipelineSearchResult:
        """Return the fastest pipeline of what was walked over."""
        for bound_s, _, item in self._heap:
            self._note(item.pipeline, bound_s)
        left_s = min((bound_s for bound_s, _, _ in self._heap), default=math.inf)
        return PipelineSearchResult(
            plan=None if self._best is None else self._best.whole(self._stages),
            bound_s=min(left_s, self._proved_s, self._at_most_s),
            complete=left_s >= self._at_most_s and not (self._unsolved and self._is_over),
            meshes=tuple(self._reports()),
        )

    @property
    def _is_over(self) -> bool:
        return self.deadline is not None and time.perf_counter() >= self.deadline

    # --- what there is ------------------------------------------------------------------------------------------

    def _items(self) -> Iterator[_Item]:
        """Yield every pipeline with its first bound."""
        for pipeline in self._space.pipelines(self.counts, self.modes):
            yield _Item(pipeline=pipeline, bounds=tuple(self._work.bounds(pipeline)))

    def _likely_first(self, items: Sequence[_Item]) -> tuple[list[_Item], list[_Item]]:
        """Return the pipelines of which one is solved first, to give the others something to beat, and the others.

        They are as wide inside as people take it, recompute, since that fits, and split samples evenly. None are on a
        mesh that is there beside those that were asked for: its programs are the largest.
        """
        sizes = [math.prod(item.pipeline.mesh.shape[1:]) if self._is_usual(item) else 0 for item in items]
        widest = max((size for size in sizes if size <= _WIDE), default=0)
        likely, others = list[_Item](), list[_Item]()
        for item, size in zip(items, sizes, strict=True):
            is_likely = 0 < size == widest and item.pipeline.ac == self.modes[-1]
            (likely if is_likely else others).append(item)
        return likely, others

    def _is_usual(self, item: _Item) -> bool:
        mesh = item.pipeline.mesh
        return self._space.splits_samples(mesh, item.pipeline.micro_batches) and self._space.has_single_chunks(mesh)

    # --- what comes next -----------------------------------------------------------------------------------------

    def _push(self, item: _Item) -> None:
        heapq.heappush(self._heap, (item.bound_s, next(self._numbers), item))

    @property
    def next_s(self) -> float:
        """The lowest bound of what goes next; infinite where nothing that is known could be better, or time is up."""
        if not self._heap or self._heap[0][0] >= self._at_most_s or self._is_over:
            return math.inf
        return self._heap[0][0]

    @property
    def wanted_s(self) -> float:
        """The step time from which on a plan is not wanted."""
        return self._at_most_s

    def want_less(self, time_s: float) -> None:
        """From now on want no plan that takes ``time_s`` or more."""
        self._at_most_s = min(self._at_most_s, time_s)

    def pick(self) -> tuple[StageKey | _Item, _Task] | None:
        """Return the next look and the task for it; None where nothing that is known could be better, or time is up."""
        while self.next_s < math.inf:
            item = heapq.heappop(self._heap)[2]
            if not item.looks and not self._may_fit(item.pipeline):
                self._note(item.pipeline, math.inf)
                continue
            step = self._step(item)
            if step is None:
                return item, self._solve(item)
            if step.look in self._known:
                self._raise(item, step, self._known[step.look])
                continue
            fewer: BoundingStep | None = None
            if step.is_floor and step.is_shared:
                item, fewer = self._after_fewer(item, step)
                if item.bound_s >= self._at_most_s:
                    self._note(item.pipeline, item.bound_s)
                    continue
            look = (fewer or step).look
            is_begun = look in self._waiting
            self._waiting.setdefault(look, []).append((item, None if fewer else step))
            if not is_begun:
                return look, self._task(fewer or step, item)
        return None

    def _after_fewer(self, item: _Item, step: BoundingStep) -> tuple[_Item, BoundingStep | None]:
        """Return a pipeline after what is known of its stage in fewer micro-batches, and that look at one in fewer
        which comes first: it is wanted itself. None where there is none.

        More micro-batches do the same work in smaller pieces, so that a stage does no less in all (`mesh_bound`).
        """
        pipeline, kind, stages = item.pipeline, step.bounded, len(item.pipeline.counts)
        if self.search.batch == pipeline.micro_batches:  # a single sample is split otherwise
            return item, None
        # Layouts that divide the samples of a micro-batch divide those of several together.
        divisors = (c for c in self.counts if c < pipeline.micro_batches and pipeline.micro_batches % c == 0)
        for count in divisors:
            other = dataclasses.replace(step, pipeline=dataclasses.replace(step.pipeline, micro_batches=count))
            alike = dataclasses.replace(
                pipeline, micro_batches=count, chunks=pipeline.chunks if count % stages == 0 else 1
            )
            found = self._known.get(other.look)
            if isinstance(found, StageBound):
                bound_s = found.bounds_s.get(pipeline.ac, 0.0) if kind.blocks >= found.blocks else 0.0
                more = (pipeline.passes / pipeline.micro_batches) / (other.pipeline.passes / count)
                item = dataclasses.replace(item.raised(kind, bound_s * more), looks=item.looks)
            elif self._may_be_wanted(item, alike):
                return item, other
        return item, None

    def _may_be_wanted(self, item: _Item, fewer: PipelineRun) -> bool:
        """Tell whether a pipeline that differs from ``item`` in having fewer micro-batches may be wanted and fit."""
        share = (fewer.passes / fewer.micro_batches) / (item.pipeline.passes / item.pipeline.micro_batches)
        bounds = [bound * share for bound in item.bounds]
        return (
            self._space.splits_samples(fewer.mesh, fewer.micro_batches)
            and least_step_s(bounds, fewer.micro_batches, fewer.chunks) < self._at_most_s
            and self._may_fit(fewer)
        )

    def _step(self, item: _Item) -> BoundingStep | None:
        """Return the next look at a pipeline's stages; None where there is none but to solve it."""
        return next(itertools.islice(bounding_steps(self._space, item.pipeline), item.looks, None), None)

    def _task(self, step: BoundingStep, item: _Item) -> _Task:
        pipeline = step.pipeline
        if step.is_floor:
            self._say(f"bounding a stage on mesh {pipeline.whole_mesh}, {pipeline.micro_batches} micro-batches")
            share = pipeline.passes / pipeline.micro_batches / pipeline.mesh.size
            # It is one for all modes of checkpointing: what it says within the cap, it says of no checkpointing.
            of_all = dataclasses.replace(step, pipeline=dataclasses.replace(pipeline, ac=self.modes[0]))
            again_s = self._work.again_s
            fitting = (ac for ac in again_s if self._stage_may_fit(step.kind, dataclasses.replace(pipeline, ac=ac)))
            return BoundStage(
                kind=step.kind,
                pipeline=of_all.pipeline,
                again_s={ac: again_s[ac] * share for ac in fitting},
                limit_s=self._limit_s(of_all, self._work.bounds(of_all.pipeline)),
            )
        floor = self._floor(step)
        return RelaxStage(
            kind=step.kind,
            pipeline=pipeline,
            floor=None if floor is None else floor.floor,
            limit_s=self._limit_s(step, item.bounds),
        )

    def _limit_s(self, step: BoundingStep, bounds: Sequence[float]) -> float:
        """Return from which seconds on a stage is not wanted, given what bounds each of its pipeline's."""
        if step.is_shared:
            return shared_limit_s(self._space, self._work, step, self._at_most_s)
        return stage_limit_s(bounds, step.kind, step.pipeline.micro_batches, self._at_most_s)

    def _floor(self, step: BoundingStep) -> StageBound | None:
        """Return a floor that holds for the stage that is looked at, choice by choice."""
        kind, pipeline = step.kind, step.pipeline
        looked_at = pipeline if pipeline.chunks > 1 else in_one_piece(self._space, pipeline)
        found = self._known.get(dataclasses.replace(step, is_floor=True, pipeline=looked_at).look)
        if not isinstance(found, StageBound) or step.pipeline.ac not in found.bounds_s:
            return None
        # With fewer blocks the first and the last of a stage are not like those between them: other choices.
        is_alike = found.blocks == kind.blocks or (kind.chunks == 1 and ALIKE <= found.blocks <= kind.blocks)
        return found if is_alike else None

    def _may_fit(self, pipeline: PipelineRun) -> bool:
        """Tell whether no stage needs too much memory by count of its blocks' tensors alone, however they are split."""
        return all(self._stage_may_fit(kind, pipeline) for kind in pipeline.kinds)

    def _stage_may_fit(self, kind: StageKind, pipeline: PipelineRun) -> bool:
        batch = self.search.batch // pipeline.micro_batches
        if (batch == 1) not in self._blocks:  # of a single sample autograd may keep other tensors
            counted = 1 if batch == 1 else self.search.batch // self.counts[0]
            self._blocks[batch == 1] = BlockMemory.of(self._stages, counted, self.modes, self.search.job)
        run = self._stages.run(self.search, kind, pipeline)
        split = self._blocks[batch == 1].of_stage(kind.blocks, run, batch) / run.mesh.size
        return split + reserve_bytes(run.cluster.device) <= self.search.memory_bytes

    def _solve(self, item: _Item) -> SolvePipeline:
        pipeline = item.pipeline
        self._say(
            f"solving mesh {pipeline.whole_mesh}, {pipeline.micro_batches} micro-batches, checkpointing {pipeline.ac}"
        )
        steps = [step for step in bounding_steps(self._space, pipeline) if not step.is_floor and not step.is_shared]
        return SolvePipeline(
            pipeline=pipeline,
            bounds=item.bounds,
            floors={s.kind: f.floor for s in steps if (f := self._floor(s)) is not None and f.floor is not None},
            at_most_s=self._at_most_s,
            mip_gap=self.search.job.mip_gap if item.is_tried or self._best is not None else _FIRST_GAP,
            left_s=None if self.deadline is None else max(self.deadline - time.perf_counter(), 0.0),
        )

    # --- what came of it -----------------------------------------------------------------------------------------

    def done(self, look: StageKey | _Item, task: _Task, found: StageBound | float | PipelineResult) -> None:
        """Note what came of a task."""
        if isinstance(look, _Item):
            assert isinstance(task, SolvePipeline)
            assert isinstance(found, PipelineResult)
            self._solved(look, task, found)
            return
        assert not isinstance(found, PipelineResult)
        self._known[look] = found
        for item, step in self._waiting.pop(look):
            if step is None:  # it was looked at for what it says of others
                self._push(item)
            else:
                self._raise(item, step, found)

    def _raise(self, item: _Item, step: BoundingStep, found: StageBound | float) -> None:
        """Raise a pipeline's bound by what was found of a stage."""
        pipeline, kind = item.pipeline, step.bounded
        bound_s = found.bound_s(kind, pipeline.ac) if isinstance(found, StageBound) else found
        bound_s *= pipeline.passes / step.pipeline.passes  # a stage that is not cut waits longer
        raised = item.raised(kind, bound_s)
        if raised.bound_s < self._at_most_s:
            self._push(raised)
        else:
            self._note(pipeline, raised.bound_s)

    def _solved(self, item: _Item, task: SolvePipeline, found: PipelineResult) -> None:
        """Note what came of solving a pipeline, and keep it where it is the best."""
        step_s = None if found.best is None else found.best.step_time_s
        self._note(task.pipeline, min(found.bound_s, task.at_most_s), step_s)
        if found.best is not None and found.best.step_time_s < self._at_most_s:
            self._keep(found.best)
        if task.mip_gap > self.search.job.mip_gap and found.bound_s < self._at_most_s and not self._is_over:
            self._push(dataclasses.replace(item, is_tried=True))
        else:
            self._unsolved |= found.broke_off
            self._proved_s = min(self._proved_s, found.bound_s)

    def _keep(self, found: SolvedPipeline) -> None:
        """Take a pipeline as the best so far."""
        self._best = found
        self.want_less(found.step_time_s * (1.0 - self.search.job.mip_gap))
        self._say(f"best so far {found.step_time_s:.6g} s")

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
