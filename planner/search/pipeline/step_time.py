"""Step time of a pipeline, given the times of its stages; and the kinds of equal stages.

A stage is planned like a model of its own, on its part of the devices. Its step time ``U``, in seconds, is that of a
pipeline in which all stages equal this one. Let the pipeline run ``m`` micro-batches on ``p`` stages, each of ``v``
chunks of the model. A step of equal stages then takes ``P = m + (p - 1) / v`` passes (`Run.passes`) and ``o`` seconds
of the optimizer. A pass is the forward and backward of one micro-batch on one stage, and takes ``t = (U - o) / P``
seconds. If the stages differ, 1F1B waits for the slowest stage in each of ``m`` passes. At both ends of the step it
waits for one chunk of each other stage:

    step = m max t + (sum t - max t) / v + max o

(`pipeline_schedules`: idle time of 1F1B; Narayanan et al., arXiv 2006.09503, and arXiv 2104.04473 for ``v > 1``.) The
step grows with every ``t`` and every ``o``, so stages are planned one by one. If ``U >= b`` for each stage, then for
any ``o``

    step >= (m max b + (sum b - max b) / v) / P

There are two simplifications. Exposed gradient reduction is part of ``t``, although it occurs once a step. The chunks
of a stage take equal times, so that the embedding in the first stage, or the head in the last, counts in ``t`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.configuration.pipeline_schedules import idle_passes
from planner.plan.estimate import Estimate
from planner.search.pipeline.interleaving import Role, role_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """Equal stages: the first stage, the last stage, or the middle stages with an equal number of blocks.

    Attributes:
        blocks: number of blocks of each stage.
        indices: positions of the stages in the pipeline. All are planned as the first of them, which holds activations
            of the most micro-batches.
        chunks: chunks of the model on each stage.
    """

    role: Role
    blocks: int
    indices: tuple[int, ...]
    chunks: int = 1


def kinds_of(counts: Sequence[int], chunks: int = 1) -> tuple[StageKind, ...]:
    """Return the kinds of stages, the most frequent first, given the number of blocks of each stage.

    Among equally frequent kinds middle stages come first: most pipelines have them and can share their bounds.
    """
    stages_of: dict[tuple[Role, int], list[int]] = {}
    for index, count in enumerate(counts):
        stages_of.setdefault((role_of(index, len(counts)), count), []).append(index)
    kinds = [
        StageKind(role=role, blocks=n, indices=tuple(stages), chunks=chunks) for (role, n), stages in stages_of.items()
    ]
    return tuple(sorted(kinds, key=lambda kind: (-len(kind.indices), kind.role != "middle")))


def pass_s(estimate: Estimate, passes: float) -> float:
    """Return the seconds ``t`` of one pass of a stage, given its estimate (step time ``U``) and its ``P``."""
    return (estimate.step_time_s - estimate.optimizer_s) / passes


def pipeline_step_s(stages: Sequence[Estimate], micro_batches: int, chunks: int = 1) -> float:
    """Return the seconds of a step, given the estimate of each stage (step time ``U``)."""
    passes = micro_batches + idle_passes(len(stages), chunks)
    seconds = [pass_s(stage, passes) for stage in stages]
    return _all_passes_s(seconds, micro_batches, chunks) + max(stage.optimizer_s for stage in stages)


def least_step_s(bounds: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Return a lower bound in seconds on a step, given a lower bound on the ``U`` of each stage."""
    return _all_passes_s(bounds, micro_batches, chunks) / (micro_batches + idle_passes(len(bounds), chunks))


def _all_passes_s(seconds: Sequence[float], micro_batches: int, chunks: int) -> float:
    """Return the seconds of all passes of a step, given the ``seconds`` of each stage's pass."""
    slowest_s = max(seconds)
    return micro_batches * slowest_s + (sum(seconds) - slowest_s) / chunks


def stage_cutoff_s(bounds: Sequence[float], kind: StageKind, micro_batches: int, cutoff_s: float) -> float:
    """Return the ``U`` in seconds at which the stages of ``kind`` bring the lower bound on a step to ``cutoff_s``."""
    passes, chunks = micro_batches + idle_passes(len(bounds), kind.chunks), kind.chunks
    other_bounds_s = sum(bound for index, bound in enumerate(bounds) if index not in kind.indices)
    return (passes * cutoff_s - other_bounds_s / chunks) / (micro_batches + (len(kind.indices) - 1) / chunks)
