"""Which equal blocks are alike: in one part of a list they share every decision, and are run again together or not.

All of a list is one part as a rule. "The first k of n" is two: the first blocks of a list and the rest, each with
layouts of its own, and of which only the first may be checkpointed. (The first, not the last: backward begins at the
end, so that most of what the rest keeps is gone when the first are run again.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.plan.job import Checkpointing, CheckpointingMode
from planner.regions.blocks import Blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """How the blocks of a run are grouped. (Tuples, so that it can be a key.)

    Attributes:
        modes: block -> how it is checkpointed, of those that are.
        parts: block -> number of the part that it is in; equal blocks of a part are alike, and blocks that are not
            named are a part as well.
    """

    modes: tuple[tuple[str, CheckpointingMode], ...] = ()
    parts: tuple[tuple[str, int], ...] = ()


UNIFORM_BLOCKS = Grouping()
"""Equal blocks are alike, and none is checkpointed."""


def group_first_blocks(blocks: Blocks, ac: str, apart: int | None = None) -> Grouping:
    """Return the grouping of a mode of checkpointing, with the first blocks of each list apart from the rest.

    Args:
        blocks: of the model.
        ac: as in a job.
        apart: how many are apart, beside those that are checkpointed and those that are not; None: no more.
    """
    mode, first = Checkpointing.parse(ac)
    again = blocks.first(first) if mode != "none" else ()
    modes: dict[str, CheckpointingMode] = dict.fromkeys(again, "selective" if mode == "selective" else "full")
    return group_blocks(blocks, modes, apart)


def group_blocks(blocks: Blocks, modes: Mapping[str, CheckpointingMode], apart: int | None = None) -> Grouping:
    """Return the grouping in which blocks of one mode are alike, the first ``apart`` of each list among themselves."""
    front = frozenset(() if apart is None else blocks.first(apart))
    kinds: dict[tuple[str | None, bool], int] = {}
    parts = {block: kinds.setdefault((modes.get(block), block in front), len(kinds)) for block in blocks.first(None)}
    return Grouping(modes=tuple(modes.items()), parts=tuple(parts.items()) if len(kinds) > 1 else ())
