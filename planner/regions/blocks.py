"""Blocks: the repeated modules of a model (transformer layers), which checkpointing and FSDP groups wrap."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from planner.regions.regions import RegionGraph, block_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of a model.

    Attributes:
        of_region: index of a region -> FQN of its block; regions outside of blocks are left out.
        representatives: one block of each kind. Blocks whose regions are equal are of one kind.
        lists: FQN pattern that matches exactly the blocks of one list -> these blocks, in order.
    """

    of_region: Mapping[int, str]
    representatives: tuple[str, ...]
    lists: Mapping[str, tuple[str, ...]]

    def first(self, count: int | None) -> tuple[str, ...]:
        """Return the first ``count`` blocks of each list; None: all of them."""
        return tuple(block for blocks in self.lists.values() for block in blocks[:count])


def find_blocks(regions: RegionGraph, known_lists: AbstractSet[str] = frozenset()) -> Blocks:
    """Return the blocks: children of a numbered list that hold parameters, where at least two are in the list.

    A block is called: not a list in a list, nor a module whose ``forward`` the model calls by itself, past the hooks
    that gather an FSDP group.

    Args:
        known_lists: patterns of lists that count as such even with one block. A pipeline stage has a part of the
            model's blocks, and takes the lists of the whole model.
    """
    called = {call.fqn for call in regions.graph.calls}
    of_region: dict[int, str] = {}
    classes: dict[str, list[int]] = defaultdict(list)
    with_parameters: set[str] = set()
    for region in regions.regions:
        block = block_of(region.fqn)
        if block is None or block not in called:
            continue
        of_region[region.index] = block
        classes[block].append(regions.class_of[region.index])
        if any(slot.origin == "parameter" for slot in region.slots):
            with_parameters.add(block)
    siblings: dict[str, list[str]] = defaultdict(list)
    for block in classes:
        if block in with_parameters:
            siblings[re.sub(r"\d+$", "*", block)].append(block)
    lists = {pattern: blocks for pattern, blocks in siblings.items() if len(blocks) > 1 or pattern in known_lists}
    repeated = {block for blocks in lists.values() for block in blocks}
    kinds: dict[Hashable, str] = {}
    for block in classes:
        if block in repeated:
            kinds.setdefault(tuple(sorted(classes[block])), block)
    return Blocks(
        of_region={index: block for index, block in of_region.items() if block in repeated},
        representatives=tuple(kinds.values()),
        lists={pattern: tuple(sorted(blocks, key=_position)) for pattern, blocks in sorted(lists.items())},
    )


def _position(block: str) -> int:
    """Return the position of a block in its list."""
    return int(block.rpartition(".")[2])
