"""Grouping of a model's blocks: which equal blocks share their decisions, and which blocks are checkpointed.

Equal blocks in the same part share every decision, and all of them are checkpointed alike. By default all blocks of a
list are one part. Checkpointing only "the first k of n" blocks makes two parts, each with layouts of its own. The first
blocks are the ones to checkpoint: the backward begins with the last, so that most activations that the other blocks
saved are freed when the first blocks are recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.plan.job import Checkpointing, CheckpointingMode
from planner.regions.blocks import Blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """How the blocks of a run are grouped. Its fields are tuples, so that it can be a dictionary key.

    Attributes:
        modes: (checkpointed block, its mode).
        parts: (block, number of its part). Blocks that are not listed are one more part.
    """

    modes: tuple[tuple[str, CheckpointingMode], ...] = ()
    parts: tuple[tuple[str, int], ...] = ()


UNIFORM_BLOCKS = Grouping()
"""All equal blocks share their decisions, and none is checkpointed."""


def group_first_blocks(blocks: Blocks, ac: str, apart: int | None = None) -> Grouping:
    """Return the grouping in which ``ac`` is applied, and the first blocks of each list are parts of their own.

    Args:
        blocks: the blocks of the model.
        ac: activation checkpointing as a job states it, such as ``full:8``.
        apart: number of first blocks that differ from the others in more than checkpointing; None: none do.
    """
    mode, first, others = Checkpointing.parse(ac)
    leading = frozenset(blocks.first(first))
    each = {block: mode if block in leading else others for block in blocks.first(None)}
    modes: dict[str, CheckpointingMode] = {
        block: "selective" if chosen == "selective" else "full" for block, chosen in each.items() if chosen != "none"
    }
    return group_blocks(blocks, modes, apart)


def group_blocks(blocks: Blocks, modes: Mapping[str, CheckpointingMode], apart: int | None = None) -> Grouping:
    """Return the grouping with a part for each combination of mode and being among the first ``apart`` of a list."""
    front = frozenset(() if apart is None else blocks.first(apart))
    numbers: dict[tuple[str | None, bool], int] = {}
    parts = {
        block: numbers.setdefault((modes.get(block), block in front), len(numbers)) for block in blocks.first(None)
    }
    return Grouping(modes=tuple(modes.items()), parts=tuple(parts.items()) if len(numbers) > 1 else ())
