"""`passes`: when each pipeline stage runs the forward and the backward of each micro-batch of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from planner.plan.estimate import Estimate, Pipeline

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward or backward of one micro-batch on one stage.

    Attributes:
        stage: index of the stage; 0 without a pipeline.
        start_s: seconds from the start of the step.
    """

    stage: int
    direction: Direction
    micro_batch: int
    start_s: float
    duration_s: float


def passes(estimate: Estimate, micro_batches: int, pipeline: Pipeline | None, *, stage: int) -> tuple[Pass, ...]:
    """Return the passes of a step of all stages.

    All stages take turns at the pace of the slowest, as the estimate assumes. A faster stage waits within its turn.

    Args:
        estimate: the estimate of the plan, whose seconds of passes are those of the slowest stage.
        pipeline: the pipeline; None: one stage runs all passes one after another.
        stage: index of the slowest stage.
    """
    forward_s, backward_s = estimate.forward_s / micro_batches, estimate.backward_s / micro_batches
    if pipeline is None:
        return tuple(_in_a_row(micro_batches, forward_s, backward_s))
    slowest_s = pipeline.stages[stage].micro_batch_s or 1.0
    shares = [min(each.micro_batch_s / slowest_s, 1.0) for each in pipeline.stages]
    if pipeline.chunks == 1:
        turns = _one_f_one_b(len(shares), micro_batches, forward_s, backward_s)
    else:
        turns = _evenly_delayed(pipeline, micro_batches, forward_s, backward_s)
    return tuple(
        Pass(
            stage=turn.stage,
            direction=turn.direction,
            micro_batch=turn.micro_batch,
            start_s=turn.start_s,
            duration_s=turn.duration_s * (1.0 if turn.stage == stage else shares[turn.stage]),
        )
        for turn in turns
    )


def _in_a_row(micro_batches: int, forward_s: float, backward_s: float) -> Iterator[Pass]:
    for number in range(micro_batches):
        start_s = number * (forward_s + backward_s)
        yield Pass(stage=0, direction="forward", micro_batch=number, start_s=start_s, duration_s=forward_s)
        if backward_s > 0:
            after = start_s + forward_s
            yield Pass(stage=0, direction="backward", micro_batch=number, start_s=after, duration_s=backward_s)


def _one_f_one_b(stages: int, micro_batches: int, forward_s: float, backward_s: float) -> Iterator[Pass]:
    """Yield the passes of the 1F1B schedule (PipeDream-Flush): a stage's forwards first, then one of each by turns."""
    orders = [list(_order(stage, stages, micro_batches)) for stage in range(stages)]
    ends: dict[tuple[int, Direction, int], float] = {}
    free = [0.0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                direction, number = order[0]
                before = (stage - 1 if direction == "forward" else stage + 1, direction, number)
                if 0 <= before[0] < stages and before not in ends:
                    break
                start_s = max(free[stage], ends.get(before, 0.0))
                duration_s = forward_s if direction == "forward" else backward_s
                free[stage] = ends[stage, direction, number] = start_s + duration_s
                order.pop(0)
                yield Pass(stage=stage, direction=direction, micro_batch=number, start_s=start_s, duration_s=duration_s)


def _order(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[Direction, int]]:
    """Yield the passes of a stage under 1F1B in their order."""
    ahead = min(stages - stage - 1, micro_batches)
    yield from (("forward", number) for number in range(ahead))
    for number in range(ahead, micro_batches):
        yield "forward", number
        yield "backward", number - ahead
    yield from (("backward", number) for number in range(micro_batches - ahead, micro_batches))


def _evenly_delayed(pipeline: Pipeline, micro_batches: int, forward_s: float, backward_s: float) -> Iterator[Pass]:
    """Yield the passes of interleaved stages, simplified: a stage runs all of its passes without a gap.

    The chunks of a stage take turns; drawn are their micro-batches as a whole. The first stage starts at once, the last
    one after the forward's part of the bubble.
    """
    both_s = forward_s + backward_s
    delay_s = pipeline.idle_s * forward_s / both_s / max(len(pipeline.stages) - 1, 1) if both_s else 0.0
    for stage in range(len(pipeline.stages)):
        for turn in _in_a_row(micro_batches, forward_s, backward_s):
            yield Pass(
                stage=stage,
                direction=turn.direction,
                micro_batch=turn.micro_batch,
                start_s=turn.start_s + stage * delay_s,
                duration_s=turn.duration_s,
            )
