"""In which order the stages of a pipeline are looked at, and what a look at one says of others.

First the floor (`mesh_bound`) of the most frequent stage, as if no stage were cut into chunks, and of the shortest
that any split has in its place; then that stage's relaxation within the cap. Both serve all splits, and interleaved
stages: those do no less, keep no less and send more, so that what holds in one piece holds for them but for the idle
time, and for messages, which they need not wait for: where there are interleaved stages, those of the one that is
looked at for all run beside computing throughout, which is no more than either takes. On a mesh for interleaved stages
alone these looks are left out. Of interleaved stages the floor in their chunks comes next, and then the relaxations of
all kinds of stages, one after the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from planner.search.pipeline.space import PipelineSpace
from planner.search.pipeline.stage_planners import PipelineRun
from planner.search.pipeline.step_time import StageKind, stage_limit_s
from planner.search.pipeline.tasks import SingleDeviceTime

ALIKE = 3
"""From how many blocks on a stage of one more has the same kinds of choices: it has another block between the first and
the last."""

StageKey = tuple[Hashable, ...]
"""What names a look at a stage, in whichever pipelines it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundingStep:
    """A look at a stage.

    Attributes:
        is_floor: whether its floor is looked for, or its relaxation within the cap.
        pipeline: the one that is looked at.
        kind: of its stage.
        bounded: the kind of stage, of the pipeline that the step is for, that it bounds.
        is_shared: whether the look serves other ways to spread the blocks.
    """

    is_floor: bool
    pipeline: PipelineRun
    kind: StageKind
    bounded: StageKind
    is_shared: bool

    @property
    def look(self) -> StageKey:
        """What names the look: a floor is one for all modes of checkpointing."""
        run, kind = self.pipeline, self.kind
        where = kind.role, len(run.counts), run.mesh, run.micro_batches, run.chunks, run.bounds_chunks
        return where if self.is_floor else (*where, kind.blocks, kind.indices[0], run.ac)


def bounding_steps(space: PipelineSpace, pipeline: PipelineRun) -> Iterator[BoundingStep]:
    """Yield the looks at a pipeline's stages, in order."""
    whole, kinds = in_one_piece(space, pipeline), pipeline.kinds
    shortest = shortest_alike(space, whole, whole.kinds[0])
    for is_floor in (True, False) if space.has_single_chunks(pipeline.mesh) else ():
        yield BoundingStep(is_floor=is_floor, pipeline=whole, kind=shortest, bounded=kinds[0], is_shared=True)
    if pipeline.chunks > 1:
        yield BoundingStep(is_floor=True, pipeline=pipeline, kind=kinds[0], bounded=kinds[0], is_shared=False)
    for kind in kinds:
        yield BoundingStep(is_floor=False, pipeline=pipeline, kind=kind, bounded=kind, is_shared=False)


def in_one_piece(space: PipelineSpace, pipeline: PipelineRun) -> PipelineRun:
    """Return the pipeline whose stages bound those of ``pipeline``, and of all others with as many."""
    interleaved = any(chunks > 1 for _, chunks in space.spreads(len(pipeline.counts)))
    return dataclasses.replace(pipeline, chunks=1, bounds_chunks=interleaved)


def shortest_alike(space: PipelineSpace, whole: PipelineRun, kind: StageKind) -> StageKind:
    """Return the kind of stage that has the fewest blocks, `ALIKE` at least, in the place of ``kind`` in any split."""
    splits = (dataclasses.replace(whole, counts=split) for split in space.splits(len(whole.counts)))
    alike = (k for other in splits for k in other.kinds if _place(k) == _place(kind) and k.blocks >= ALIKE)
    return min((kind, *alike), key=lambda k: k.blocks)


def shared_limit_s(space: PipelineSpace, work: SingleDeviceTime, step: BoundingStep, at_most_s: float) -> float:
    """Return from which seconds on no pipeline wants what a shared step looks at, however its blocks are spread."""
    run, limits = step.pipeline, [0.0]
    for counts, chunks in space.spreads(len(run.counts)):
        other = dataclasses.replace(run, counts=counts, chunks=chunks, bounds_chunks=False)
        waits = run.passes / other.passes
        for kind in other.kinds:
            if _place(kind) == _place(step.kind):
                limit_s = stage_limit_s(work.bounds(other), kind, run.micro_batches, at_most_s)
                limits.append(waits * limit_s)
    return max(limits) if len(limits) > 1 else math.inf


def _place(kind: StageKind) -> tuple[str, int]:
    return kind.role, kind.indices[0]
