"""Pipeline stages: which are alike, and what a step of a pipeline takes, given what its stages do.

A stage is planned like a model of its own, on its share of the devices, as if all stages were its equals: with ``m``
micro-batches on ``p`` stages a step then takes as long as ``m + p - 1`` of its passes and what it does once
(`Run.passes`). Write ``U`` for these seconds, ``o`` for those of its optimizer, ``t = (U - o) / (m + p - 1)``. With
stages that are no equals 1F1B waits for the slowest:

    step = (m - 1) max t + sum t + max o

(cost_model.pipeline: idle time of 1F1B; Narayanan et al., arXiv 2006.09503.) The step grows with every ``t`` and every
``o``, so that stages are planned one by one. And where ``U >= b`` for each stage, whatever part of it is ``o``,

    step >= ((m - 1) max b + sum b) / (m + p - 1)

What of the reductions of gradients is not hidden is taken as a part of ``t``, though it is paid once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.report import Estimate

Role = Literal["first", "middle", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """Stages that are alike: the first, the last, or those between them that have as many blocks.

    Attributes:
        blocks: that each has.
        indices: of the stages. The first of them keeps activations of most micro-batches; the others do as it does.
    """

    role: Role
    blocks: int
    indices: tuple[int, ...]


def kinds_of(counts: Sequence[int]) -> tuple[StageKind, ...]:
    """Return the kinds of stages that have so many blocks, the most frequent first."""
    last = len(counts) - 1
    found: dict[tuple[Role, int], list[int]] = {}
    for index, count in enumerate(counts):
        role: Role = "first" if index == 0 else "last" if index == last else "middle"
        found.setdefault((role, count), []).append(index)
    kinds = [StageKind(role=role, blocks=n, indices=tuple(stages)) for (role, n), stages in found.items()]
    return tuple(sorted(kinds, key=lambda kind: -len(kind.indices)))


def pass_s(estimate: Estimate, passes: int) -> float:
    """Return the seconds ``t`` of a stage, given what it takes as one of equals."""
    return (estimate.step_time_s - estimate.optimizer_s) / passes


def pipeline_step_s(stages: Sequence[Estimate], micro_batches: int) -> float:
    """Return the seconds of a step, given what each stage takes as one of equals."""
    passes = micro_batches + len(stages) - 1
    seconds = [pass_s(stage, passes) for stage in stages]
    return (micro_batches - 1) * max(seconds) + sum(seconds) + max(stage.optimizer_s for stage in stages)


def least_step_s(bounds: Sequence[float], micro_batches: int) -> float:
    """Return what no step can beat, given what no stage can beat as one of equals."""
    passes = micro_batches + len(bounds) - 1
    return ((micro_batches - 1) * max(bounds) + sum(bounds)) / passes


def stage_limit_s(bounds: Sequence[float], kind: StageKind, micro_batches: int, at_most_s: float) -> float:
    """Return from which seconds on, as one of equals, a stage of ``kind`` brings the step to ``at_most_s``."""
    passes, count = micro_batches + len(bounds) - 1, len(kind.indices)
    others = sum(bound for index, bound in enumerate(bounds) if index not in kind.indices)
    return (passes * at_most_s - others) / (micro_batches - 1 + count)
