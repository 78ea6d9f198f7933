"""Step time of a pipeline, given the times of its stages; and the kinds of stages that are alike.

A stage is planned like a model of its own, on its share of the devices, as one of equal stages. With ``m``
micro-batches on ``p`` stages, each of ``v`` chunks of the model, a step of equal stages takes ``P = m + (p - 1) / v``
passes of one stage and what it does once a step (`Run.passes`). Let ``U`` be these seconds, ``o`` those of the
optimizer, and ``t = (U - o) / P`` those of one pass. If stages differ, 1F1B waits for the slowest, and at both ends of
the step for one chunk of each of the others:

    step = m max t + (sum t - max t) / v + max o

(`pipeline_schedules`: idle time of 1F1B; Narayanan et al., arXiv 2006.09503, and arXiv 2104.04473 for ``v > 1``.) The
step grows with every ``t`` and every ``o``, so stages are planned one by one. Where ``U >= b`` for each stage, whatever
part of it is ``o``,

    step >= (m max b + (sum b - max b) / v) / P

Two simplifications: exposed gradient reduction is part of ``t``, though it is paid once a step; and the chunks of a
stage are equal, so that the embedding in the first, or the head in the last, counts in ``t`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.configuration.pipeline_schedules import idle_passes
from planner.plan.estimate import Estimate
from planner.search.pipeline.interleaving import Role, role_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """Stages that are alike: the first, the last, or those between them with an equal number of blocks.

    Attributes:
        blocks: number of blocks of each.
        indices: of the stages. All are planned as the first of them, which keeps activations of most micro-batches.
        chunks: of the model on each.
    """

    role: Role
    blocks: int
    indices: tuple[int, ...]
    chunks: int = 1


def kinds_of(counts: Sequence[int], chunks: int = 1) -> tuple[StageKind, ...]:
    """Return the kinds of stages, given their numbers of blocks and of chunks, the most frequent first.

    Of equally frequent ones, those in the middle: most pipelines have them, so their bounds serve many.
    """
    stages_of: dict[tuple[Role, int], list[int]] = {}
    for index, count in enumerate(counts):
        stages_of.setdefault((role_of(index, len(counts)), count), []).append(index)
    kinds = [
        StageKind(role=role, blocks=n, indices=tuple(stages), chunks=chunks) for (role, n), stages in stages_of.items()
    ]
    return tuple(sorted(kinds, key=lambda kind: (-len(kind.indices), kind.role != "middle")))


def pass_s(estimate: Estimate, passes: float) -> float:
    """Return the seconds ``t`` of one pass of a stage, given its estimate as one of equal stages."""
    return (estimate.step_time_s - estimate.optimizer_s) / passes


def pipeline_step_s(stages: Sequence[Estimate], micro_batches: int, chunks: int = 1) -> float:
    """Return the seconds of a step, given the estimate of each stage as one of equal stages."""
    passes = micro_batches + idle_passes(len(stages), chunks)
    seconds = [pass_s(stage, passes) for stage in stages]
    return _all_passes_s(seconds, micro_batches, chunks) + max(stage.optimizer_s for stage in stages)


def least_step_s(bounds: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Return a lower bound in seconds on a step, given one for each stage as one of equal stages."""
    return _all_passes_s(bounds, micro_batches, chunks) / (micro_batches + idle_passes(len(bounds), chunks))


def _all_passes_s(seconds: Sequence[float], micro_batches: int, chunks: int) -> float:
    """Return the seconds of all passes of a step, given the ``seconds`` of each stage's pass."""
    slowest_s = max(seconds)
    return micro_batches * slowest_s + (sum(seconds) - slowest_s) / chunks


def stage_cutoff_s(bounds: Sequence[float], kind: StageKind, micro_batches: int, cutoff_s: float) -> float:
    """Return the seconds at which a stage of ``kind``, as one of equal stages, brings the step to ``cutoff_s``."""
    passes, chunks = micro_batches + idle_passes(len(bounds), kind.chunks), kind.chunks
    other_bounds_s = sum(bound for index, bound in enumerate(bounds) if index not in kind.indices)
    return (passes * cutoff_s - other_bounds_s / chunks) / (micro_batches + (len(kind.indices) - 1) / chunks)
