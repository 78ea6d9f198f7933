"""Blocks: the repeated modules (transformer layers) that activation checkpointing wraps."""

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
        of_region: region index -> FQN of its block.
        representatives: one block of each kind (blocks of equal regions are one kind).
        lists: FQN pattern that matches the blocks of a list and nothing else -> the blocks, in order.
    """

    of_region: Mapping[int, str]
    representatives: tuple[str, ...]
    lists: Mapping[str, tuple[str, ...]]

    def first(self, count: int | None) -> tuple[str, ...]:
        """Return the first ``count`` blocks of each list; None: all of them."""
        return tuple(block for blocks in self.lists.values() for block in blocks[:count])


def find_blocks(regions: RegionGraph, known: AbstractSet[str] = frozenset()) -> Blocks:
    """Return the repeated modules that hold parameters: children of a numbered list with at least two of a kind.

    Args:
        known: patterns of lists that are such, however few of their blocks are here: of a pipeline stage, the whole
            model's.
    """
    of_region: dict[int, str] = {}
    contents: dict[str, list[int]] = defaultdict(list)
    with_parameters: set[str] = set()
    for region in regions.regions:
        block = block_of(region.fqn)
        if block is None:
            continue
        of_region[region.index] = block
        contents[block].append(regions.class_of[region.index])
        if any(slot.origin == "parameter" for slot in region.slots):
            with_parameters.add(block)
    siblings: dict[str, list[str]] = defaultdict(list)
    for block in contents:
        if block in with_parameters:
            siblings[re.sub(r"\d+$", "*", block)].append(block)
    lists = {pattern: blocks for pattern, blocks in siblings.items() if len(blocks) > 1 or pattern in known}
    repeated = {block for blocks in lists.values() for block in blocks}
    kinds: dict[Hashable, str] = {}
    for block in contents:
        if block in repeated:
            kinds.setdefault(tuple(sorted(contents[block])), block)
    return Blocks(
        of_region={index: block for index, block in of_region.items() if block in repeated},
        representatives=tuple(kinds.values()),
        lists={pattern: tuple(sorted(blocks, key=_number)) for pattern, blocks in sorted(lists.items())},
    )


def _number(block: str) -> int:
    return int(block.rpartition(".")[2])
