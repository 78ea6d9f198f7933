"""The order in which the stages of a pipeline are bounded, and which other pipelines share the bounds.

1. The most frequent kind of stage, in one chunk, with the fewest blocks that any split gives it. It is bounded in all
   checkpointing modes (`BoundStage`), then relaxed within the memory cap (`RelaxStage`). Both bounds hold for all
   splits. Apart from idle time they also hold for interleaved stages, which compute no less, save no less and send
   more. But interleaved stages may overlap all their messages. So if there are interleaved stages, the bounded stage
   is priced with fully overlapped messages. These bounds are skipped on a mesh that is for interleaved stages only.
2. If the stages are interleaved: the most frequent kind of stage in its chunks, bounded in all checkpointing modes.
3. Every kind of stage of the pipeline, one after the other, relaxed within the memory cap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from planner.search.pipeline.single_device_time import SingleDeviceTime
from planner.search.pipeline.space import PipelineSpace
from planner.search.pipeline.stage_planners import PipelineRun
from planner.search.pipeline.step_time import StageKind, stage_cutoff_s

UNIFORM_BLOCKS = 3
"""Stages with at least so many blocks have equal choices: those of a first, a last and a middle block."""

StageKey = tuple[Hashable, ...]
"""Identifies the bound of a stage; equal for all pipelines that share the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundingStep:
    """One bound of one stage.

    Attributes:
        in_all_modes: whether the stage is bounded in all checkpointing modes; otherwise it is relaxed in one.
        pipeline: the pipeline that the computed stage is part of.
        kind: the kind of the computed stage.
        bounded: the kind of stage that the result bounds, in the pipeline that the step is for.
        is_shared: whether the result bounds such stages in other splits of the blocks too.
    """

    in_all_modes: bool
    pipeline: PipelineRun
    kind: StageKind
    bounded: StageKind
    is_shared: bool

    @property
    def key(self) -> StageKey:
        """The key of the bound."""
        run, kind = self.pipeline, self.kind
        stage = kind.role, len(run.blocks_per_stage), run.mesh, run.micro_batches, run.chunks, run.bounds_chunks
        return stage if self.in_all_modes else (*stage, kind.blocks, kind.indices[0], run.ac)


def bounding_steps(space: PipelineSpace, pipeline: PipelineRun) -> Iterator[BoundingStep]:
    """Yield the steps that bound a pipeline, in order."""
    whole, kinds = in_one_chunk(space, pipeline), pipeline.kinds
    shortest = shortest_alike(space, whole, whole.kinds[0])
    for in_all_modes in (True, False) if space.has_single_chunks(pipeline.mesh) else ():
        yield BoundingStep(in_all_modes=in_all_modes, pipeline=whole, kind=shortest, bounded=kinds[0], is_shared=True)
    if pipeline.chunks > 1:
        yield BoundingStep(in_all_modes=True, pipeline=pipeline, kind=kinds[0], bounded=kinds[0], is_shared=False)
    for kind in kinds:
        yield BoundingStep(in_all_modes=False, pipeline=pipeline, kind=kind, bounded=kind, is_shared=False)


def in_one_chunk(space: PipelineSpace, pipeline: PipelineRun) -> PipelineRun:
    """Return ``pipeline`` with one chunk per stage. Its stages bound those of all pipelines with as many stages."""
    interleaved = any(chunks > 1 for _, chunks in space.spreads(len(pipeline.blocks_per_stage)))
    return dataclasses.replace(pipeline, chunks=1, bounds_chunks=interleaved)


def shortest_alike(space: PipelineSpace, whole: PipelineRun, kind: StageKind) -> StageKind:
    """Return, over all splits, the kind of stage with the fewest blocks in the place of ``kind``.

    Other kinds than ``kind`` itself count only if they have `UNIFORM_BLOCKS` blocks or more.

    Args:
        space: the pipelines of the job.
        whole: the pipeline of ``kind``, with one chunk per stage.
        kind: a kind of stage.
    """
    splits = space.splits(len(whole.blocks_per_stage))
    pipelines = (dataclasses.replace(whole, blocks_per_stage=split) for split in splits)
    alike = (k for o in pipelines for k in o.kinds if _place(k) == _place(kind) and k.blocks >= UNIFORM_BLOCKS)
    return min((kind, *alike), key=lambda k: k.blocks)


def shared_cutoff_s(space: PipelineSpace, times: SingleDeviceTime, step: BoundingStep, cutoff_s: float) -> float:
    """Return the ``U`` (see `step_time`) in seconds at or above which the stage of a shared step is wanted in no split.

    Args:
        space: the pipelines of the job.
        times: single-device seconds of the model's parts, which bound each stage.
        step: a shared step.
        cutoff_s: step time in seconds at or above which a pipeline is not wanted.
    """
    run, cutoffs = step.pipeline, [0.0]
    for split, chunks in space.spreads(len(run.blocks_per_stage)):
        other = dataclasses.replace(run, blocks_per_stage=split, chunks=chunks, bounds_chunks=False)
        idle_ratio = run.passes / other.passes
        for kind in other.kinds:
            if _place(kind) == _place(step.kind):
                cutoffs.append(idle_ratio * stage_cutoff_s(times.bounds_s(other), kind, run.micro_batches, cutoff_s))
    return max(cutoffs) if len(cutoffs) > 1 else math.inf


def _place(kind: StageKind) -> tuple[str, int]:
    return kind.role, kind.indices[0]
