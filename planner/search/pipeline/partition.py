"""Partition of a model's blocks over pipeline stages that makes the slowest stage as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(blocks: int, stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Return the number of blocks of each stage (at least one) that makes the slowest stage as fast as possible.

    Args:
        blocks: number of equal blocks to be spread over the stages.
        stages: no more than ``blocks``.
        first: time of the ops before all blocks, which the first stage runs, in units of one block's time.
        last: time of the ops after all blocks, which the last stage runs, in units of one block's time.
    """
    counts = [1] * stages
    for _ in range(blocks - stages):
        counts[min(range(stages), key=lambda stage: _next(counts, stage, first, last))] += 1
    return tuple(counts)


def _next(counts: Sequence[int], stage: int, first: float, last: float) -> tuple[float, bool, int]:
    """Return a sort key: the stage with the smallest key gets the next block.

    That is the fastest stage. Among equally fast stages a middle one is preferred, then a later one, because later
    stages hold activations of fewer micro-batches.
    """
    end = len(counts) - 1
    work = counts[stage] + (first if stage == 0 else 0.0) + (last if stage == end else 0.0)
    return work, stage in (0, end), -stage


def slowest(counts: Sequence[int], first: float = 0.0, last: float = 0.0) -> float:
    """Return the time of the slowest stage, in units of one block's time."""
    work = [float(count) for count in counts]
    work[0] += first
    work[-1] += last
    return max(work)
