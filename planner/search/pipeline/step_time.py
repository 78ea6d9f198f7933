"""Pipeline stages: which are alike, and what a step of a pipeline takes, given what its stages do.

A stage is planned like a model of its own, on its share of the devices, as if all stages were its equals: with ``m``
micro-batches on ``p`` stages, each of ``v`` chunks of the model, a step then takes as long as ``P = m + (p - 1) / v``
of its passes and what it does once (`Run.passes`). Write ``U`` for these seconds, ``o`` for those of its optimizer,
``t = (U - o) / P``. With stages that are no equals 1F1B waits for the slowest, and at either end of the step for one
chunk of each of the others:

    step = m max t + (sum t - max t) / v + max o

(`pipeline_schedules`: idle time of 1F1B; Narayanan et al., arXiv 2006.09503, and arXiv 2104.04473 for ``v > 1``.) The
step grows with every ``t`` and every ``o``, so that stages are planned one by one. And where ``U >= b`` for each stage,
whatever part of it is ``o``,

    step >= (m max b + (sum b - max b) / v) / P

What of the reductions of gradients is not hidden is taken as a part of ``t``, though it is paid once a step. The chunks
of a stage are taken to be equal: that the first has the embedding, or the last the head, counts in its ``t`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.configuration.pipeline_schedules import idle_passes
from planner.plan.estimate import Estimate
from planner.search.pipeline.interleaving import Role, role_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """Stages that are alike: the first, the last, or those between them that have as many blocks.

    Attributes:
        blocks: that each has.
        indices: of the stages. The first of them keeps activations of most micro-batches; the others do as it does.
        chunks: of the model that each has.
    """

    role: Role
    blocks: int
    indices: tuple[int, ...]
    chunks: int = 1


def kinds_of(counts: Sequence[int], chunks: int = 1) -> tuple[StageKind, ...]:
    """Return the kinds of stages that have so many blocks, in so many chunks each, the most frequent first.

    Of equals those between the first and the last: most pipelines have them, so that what is known of them serves many.
    """
    found: dict[tuple[Role, int], list[int]] = {}
    for index, count in enumerate(counts):
        found.setdefault((role_of(index, len(counts)), count), []).append(index)
    kinds = [
        StageKind(role=role, blocks=n, indices=tuple(stages), chunks=chunks) for (role, n), stages in found.items()
    ]
    return tuple(sorted(kinds, key=lambda kind: (-len(kind.indices), kind.role != "middle")))


def pass_s(estimate: Estimate, passes: float) -> float:
    """Return the seconds ``t`` of a stage, given what it takes as one of equals."""
    return (estimate.step_time_s - estimate.optimizer_s) / passes


def pipeline_step_s(stages: Sequence[Estimate], micro_batches: int, chunks: int = 1) -> float:
    """Return the seconds of a step, given what each stage takes as one of equals."""
    passes = micro_batches + idle_passes(len(stages), chunks)
    seconds = [pass_s(stage, passes) for stage in stages]
    return _together_s(seconds, micro_batches, chunks) + max(stage.optimizer_s for stage in stages)


def least_step_s(bounds: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Return what no step can beat, given what no stage can beat as one of equals."""
    return _together_s(bounds, micro_batches, chunks) / (micro_batches + idle_passes(len(bounds), chunks))


def _together_s(seconds: Sequence[float], micro_batches: int, chunks: int) -> float:
    """Return what stages take together that take so many ``seconds`` for each micro-batch."""
    slowest_s = max(seconds)
    return micro_batches * slowest_s + (sum(seconds) - slowest_s) / chunks


def stage_limit_s(bounds: Sequence[float], kind: StageKind, micro_batches: int, at_most_s: float) -> float:
    """Return from which seconds on, as one of equals, a stage of ``kind`` brings the step to ``at_most_s``."""
    passes, chunks = micro_batches + idle_passes(len(bounds), kind.chunks), kind.chunks
    others = sum(bound for index, bound in enumerate(bounds) if index not in kind.indices)
    return (passes * at_most_s - others / chunks) / (micro_batches + (len(kind.indices) - 1) / chunks)
