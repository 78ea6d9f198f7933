"""How many blocks each pipeline stage has, so that the slowest is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(blocks: int, stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Return the blocks of each stage, one at least, whose largest sum of work is as small as can be.

    Args:
        blocks: equal blocks to be spread over the stages.
        stages: no more than ``blocks``.
        first, last: the work of the first and the last stage beside their blocks, in blocks.
    """
    counts = [1] * stages
    for _ in range(blocks - stages):
        counts[min(range(stages), key=lambda stage: _next(counts, stage, first, last))] += 1
    return tuple(counts)


def _next(counts: Sequence[int], stage: int, first: float, last: float) -> tuple[float, bool, int]:
    """Return what is least for the stage that gets the next block: of equals one in the middle, the later ones first.

    (Later stages keep activations of fewer micro-batches.)
    """
    end = len(counts) - 1
    work = counts[stage] + (first if stage == 0 else 0.0) + (last if stage == end else 0.0)
    return work, stage in (0, end), -stage


def slowest(counts: Sequence[int], first: float = 0.0, last: float = 0.0) -> float:
    """Return the work of the slowest stage, in blocks."""
    work = [float(count) for count in counts]
    work[0] += first
    work[-1] += last
    return max(work)
