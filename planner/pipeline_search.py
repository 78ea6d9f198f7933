"""Over the pipelines of a job (`planner.pipeline_space`): stages, their meshes, micro-batches, checkpointing, splits.

Stages are planned one by one (`planner.stages`), each as `Search` plans a model. Of pipelines those with the lowest
bound go next. A pipeline's first bound is its compute, perfectly split, with the idle time of 1F1B, interleaved or not;
the second the floor (`planner.floors`) of its most frequent stage at its number of micro-batches, one for all modes of
checkpointing and all splits of the blocks, and of interleaved stages one more: in chunks they do no less, and send
more, so that the floor of a stage in one piece holds for them as well, but for the idle time. Then come the relaxations
of its kinds of stages within the cap, one after the other. What is found of a stage holds in every pipeline that has
it. Then its stages are solved.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from cost_model import reserve_bytes
from cost_model.layout import MeshSpec
from planner.bench import Bench, Restrict, Terms
from planner.parallel import Pool
from planner.pipeline_space import PipelineSpace
from planner.report import MeshOutcome, MeshReport
from planner.search import Search
from planner.stage_looks import (
    BlockMemory,
    BoundStage,
    RelaxStage,
    SentPipeline,
    SolvedPipeline,
    SolvePipeline,
    StageFloor,
    Work,
)
from planner.stage_searches import PipelineRun, PlannedPipeline, StageSearches
from planner.stages import StageKind, least_step_s, stage_limit_s

_WIDE = 8
"""Ranks of all axes of a stage but the first, at most, in the pipelines that are walked through first."""

_ALIKE = 3
"""From how many blocks on a stage of one more has the same kinds of choices."""


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
    """A pipeline that is still to be solved.

    Attributes:
        bounds: what each stage cannot beat, as one of equals; ``looks`` so far have raised them.
    """

    pipeline: PipelineRun
    bounds: tuple[float, ...]
    looks: int = 0

    @property
    def bound_s(self) -> float:
        """What no step can beat."""
        return least_step_s(self.bounds, self.pipeline.micro_batches, self.pipeline.chunks)

    @property
    def floors(self) -> int:
        """How many of its looks are floors of its most frequent stage: as if that were not cut into chunks, and as it
        is."""
        return 1 if self.pipeline.chunks == 1 else 2

    @property
    def floors_left(self) -> int:
        """How many of them are to come."""
        return max(self.floors - self.looks, 0)

    @property
    def relaxed(self) -> int:
        """How many of them were relaxations."""
        return self.looks - self.floors

    @property
    def relaxing(self) -> StageKind:
        """The kind of stage that the next relaxation bounds; the most frequent one has two."""
        return self.pipeline.kinds[max(self.relaxed - 1, 0)]

    def raised(self, kind: StageKind, bound_s: float) -> _Item:
        """Return the item after another look, which found what no stage of ``kind`` can beat."""
        bounds = (max(b, bound_s) if index in kind.indices else b for index, b in enumerate(self.bounds))
        return dataclasses.replace(self, bounds=tuple(bounds), looks=self.looks + 1)


_Task = BoundStage | RelaxStage | SolvePipeline
_Look = tuple[Hashable, ...]
"""What names a look at a stage, in whichever pipelines it is."""


@dataclass(slots=True)
class PipelineSearch:
    """One walk (`planner.walks.Walk`) over the pipelines of a job whose model has no `planner.cut.obstacle`.

    Attributes:
        search: of the whole model on the whole cluster.
        counts: numbers of micro-batches to choose from.
        modes: of checkpointing.
        restrict: what pins leave to choose on a stage's mesh.
        pool: does the tasks; None: this process does.
        only: the one number of stages, and their mesh, that is searched; None: all.
        axes: that the mesh of a stage has at most.
    """

    search: Search
    counts: Sequence[int]
    modes: Sequence[str]
    restrict: Restrict
    progress: Callable[[str], None] | None = None
    deadline: float | None = None
    pool: Pool | None = None
    only: tuple[int, MeshSpec] | None = None
    axes: int = 2
    _best: SentPipeline | None = None
    _at_most_s: float = math.inf
    _proved_s: float = math.inf
    _unsolved: bool = False
    _work: Work = field(init=False)
    _bench: Bench = field(init=False)
    _here: Pool = field(init=False)
    _space: PipelineSpace = field(init=False)
    _heap: list[tuple[float, int, _Item]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _known: dict[_Look, StageFloor | float] = field(default_factory=dict)
    _waiting: dict[_Look, list[_Item]] = field(default_factory=dict)
    _blocks: dict[bool, BlockMemory] = field(default_factory=dict)
    _seen: dict[MeshSpec, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._work = Work.of_model(self.search, self.counts[0], self.modes)
        self._bench = Bench(self.search)
        terms = Terms(memory_bytes=self.search.memory_bytes, restrict=self.restrict)
        self._here = Pool(self._bench).under(terms)
        self._space = PipelineSpace(self.search, self._work, self._stages.clusters, self.only, self.axes)

    @property
    def _stages(self) -> StageSearches:
        return self._bench.stages

    def best(self, at_most_s: float = math.inf) -> Piped:
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

    def found(self) -> Piped:
        """Return the fastest pipeline of what was walked over."""
        for bound_s, _, item in self._heap:
            self._note(item.pipeline, bound_s)
        left_s = min((bound_s for bound_s, _, _ in self._heap), default=math.inf)
        return Piped(
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

        They are as wide inside as people take it, recompute, since that fits, and split samples evenly.
        """
        sizes = [math.prod(item.pipeline.mesh.shape[1:]) if self._splits_evenly(item) else 0 for item in items]
        widest = max((size for size in sizes if size <= _WIDE), default=0)
        likely, others = list[_Item](), list[_Item]()
        for item, size in zip(items, sizes, strict=True):
            is_likely = 0 < size == widest and item.pipeline.ac == self.modes[-1]
            (likely if is_likely else others).append(item)
        return likely, others

    def _splits_evenly(self, item: _Item) -> bool:
        return self._space.splits_samples(item.pipeline.mesh, item.pipeline.micro_batches)

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

    def pick(self) -> tuple[_Look | _Item, _Task] | None:
        """Return the next look and the task for it; None where nothing that is known could be better, or time is up."""
        while self.next_s < math.inf:
            item = heapq.heappop(self._heap)[2]
            look = self._look(item)
            if look is None:
                return item, self._solve(item)
            if look in self._known:
                self._raise(item, self._known[look])
            elif look in self._waiting:
                self._waiting[look].append(item)
            elif item.looks or self._may_fit(item.pipeline):
                self._waiting[look] = [item]
                return look, self._task(item)
            else:
                self._note(item.pipeline, math.inf)
        return None

    def _look(self, item: _Item) -> _Look | None:
        """Return the next look at a pipeline's stages; None where there is none but to solve it."""
        pipeline, kinds = item.pipeline, item.pipeline.kinds
        stages, shape = len(pipeline.counts), (pipeline.mesh, pipeline.micro_batches)
        if item.floors_left:
            return kinds[0].role, stages, *shape, pipeline.chunks if item.floors_left == 1 else 1
        kind = self._relaxed(item)
        if kind is not None:
            return kind.role, kind.blocks, kind.indices[0], stages, *shape, pipeline.chunks, pipeline.ac
        return None

    def _task(self, item: _Item) -> _Task:
        if item.floors_left:
            return self._bound_stage(item)
        pipeline, kind = item.pipeline, self._relaxed(item)
        assert kind is not None
        floor, own = self._floor(kind, pipeline), item.relaxing
        limit_s = stage_limit_s(item.bounds, own, pipeline.micro_batches, self._at_most_s)
        if not item.relaxed:
            limit_s = max(limit_s, self._limit_s(own, pipeline))
        return RelaxStage(kind=kind, pipeline=pipeline, floor=None if floor is None else floor.floor, limit_s=limit_s)

    def _bound_stage(self, item: _Item) -> BoundStage:
        self._say(f"bounding a stage on mesh {item.pipeline.whole_mesh}, {item.pipeline.micro_batches} micro-batches")
        pipeline = dataclasses.replace(item.pipeline, ac=self.modes[0])
        whole = pipeline if item.floors_left == 1 else dataclasses.replace(pipeline, chunks=1)
        (kind, *_), (own, *_) = whole.kinds, pipeline.kinds
        share = whole.passes / pipeline.micro_batches / pipeline.mesh.size
        waits = whole.passes / pipeline.passes
        return BoundStage(
            kind=self._shortest(kind, whole),
            pipeline=whole,
            again_s={ac: again * share for ac, again in self._work.again_s.items()},
            limit_s=max(waits * self._limit_s(own, pipeline), self._limit_s(kind, whole)),
        )

    def _relaxed(self, item: _Item) -> StageKind | None:
        """Return the kind of stage that is relaxed next; None where all were.

        Of the most frequent one first the shortest in its place that any split has, which bounds those of all splits.
        """
        if item.relaxed > len(item.pipeline.kinds):
            return None
        return item.relaxing if item.relaxed else self._shortest(item.relaxing, item.pipeline)

    def _alike(self, kind: StageKind, pipeline: PipelineRun) -> list[tuple[PipelineRun, StageKind]]:
        """Return the pipelines with other splits that have a stage of a kind's role in its place, and its kind."""
        place, splits = (kind.role, kind.indices[0]), self._space.splits(len(pipeline.counts))
        others = [dataclasses.replace(pipeline, counts=split) for split in splits if pipeline.chunks == 1]
        of_splits = ((other, k) for other in others or [pipeline] for k in other.kinds)
        return [(other, k) for other, k in of_splits if (k.role, k.indices[0]) == place]

    def _shortest(self, kind: StageKind, pipeline: PipelineRun) -> StageKind:
        """Return the kind of stage in the same place that has the fewest blocks in any split."""
        return min((k for _, k in self._alike(kind, pipeline)), key=lambda k: k.blocks, default=kind)

    def _limit_s(self, kind: StageKind, pipeline: PipelineRun) -> float:
        """Return from which seconds on no pipeline wants a stage in this place, however the blocks are split."""
        limits = (
            stage_limit_s(self._work.bounds(other), k, pipeline.micro_batches, self._at_most_s)
            for other, k in self._alike(kind, pipeline)
        )
        return max(limits, default=math.inf)

    def _floor(self, kind: StageKind, pipeline: PipelineRun) -> StageFloor | None:
        """Return a floor that holds for a kind of stage, choice by choice."""
        shape = pipeline.mesh, pipeline.micro_batches, pipeline.chunks
        found = self._known.get((kind.role, len(pipeline.counts), *shape))
        if not isinstance(found, StageFloor):
            return None
        # With fewer blocks the first and the last of a stage are not like those between them: other choices.
        is_alike = found.blocks == kind.blocks or (kind.chunks == 1 and _ALIKE <= found.blocks <= kind.blocks)
        return found if is_alike else None

    def _may_fit(self, pipeline: PipelineRun) -> bool:
        """Tell whether no stage needs too much memory by count of its blocks' tensors alone, however they are split."""
        batch = self.search.batch // pipeline.micro_batches
        if (batch == 1) not in self._blocks:  # of a single sample autograd may keep other tensors
            counted = 1 if batch == 1 else self.search.batch // self.counts[0]
            self._blocks[batch == 1] = BlockMemory.of(self._stages, counted, self.modes, self.search.job)
        memory = self._blocks[batch == 1]
        for kind in pipeline.kinds:
            run = self._stages.run(self._stages.of(kind, len(pipeline.counts)), kind, pipeline)
            least = memory.of_stage(kind.blocks, run, batch) / run.mesh.size + reserve_bytes(run.cluster.device)
            if least > self.search.memory_bytes:
                return False
        return True

    def _solve(self, item: _Item) -> SolvePipeline:
        pipeline = item.pipeline
        self._say(
            f"solving mesh {pipeline.whole_mesh}, {pipeline.micro_batches} micro-batches, checkpointing {pipeline.ac}"
        )
        kinds = pipeline.kinds
        return SolvePipeline(
            pipeline=pipeline,
            bounds=item.bounds,
            floors={k: f.floor for k in kinds if (f := self._floor(k, pipeline)) is not None and f.floor is not None},
            at_most_s=self._at_most_s,
            mip_gap=self.search.job.mip_gap,
            left_s=None if self.deadline is None else max(self.deadline - time.perf_counter(), 0.0),
        )

    # --- what came of it -----------------------------------------------------------------------------------------

    def done(self, look: _Look | _Item, task: _Task, found: StageFloor | float | SolvedPipeline) -> None:
        """Note what came of a task."""
        if isinstance(found, SolvedPipeline):
            assert isinstance(task, SolvePipeline)
            self._solved(task, found)
            return
        assert not isinstance(look, _Item)
        self._known[look] = found
        for item in self._waiting.pop(look):
            self._raise(item, found)

    def _raise(self, item: _Item, found: StageFloor | float) -> None:
        """Raise a pipeline's bound by what was found of a stage."""
        pipeline, kinds = item.pipeline, item.pipeline.kinds
        if isinstance(found, StageFloor):
            kind, bound_s = kinds[0], found.bound_s(kinds[0], pipeline.ac)
            if item.floors_left > 1:  # of a stage that is not cut, and waits longer
                bound_s *= pipeline.passes / dataclasses.replace(pipeline, chunks=1).passes
        else:
            kind, bound_s = item.relaxing, found
        raised = item.raised(kind, bound_s)
        if raised.bound_s < self._at_most_s:
            self._push(raised)
        else:
            self._note(pipeline, raised.bound_s)

    def _solved(self, task: SolvePipeline, found: SolvedPipeline) -> None:
        """Note what came of solving a pipeline, and keep it where it is the best."""
        self._unsolved |= found.broke_off
        self._proved_s = min(self._proved_s, found.bound_s)
        step_s = None if found.best is None else found.best.step_time_s
        self._note(task.pipeline, min(found.bound_s, task.at_most_s), step_s)
        if found.best is not None and found.best.step_time_s < self._at_most_s:
            self._keep(found.best)

    def _keep(self, found: SentPipeline) -> None:
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
