"""Sections: the parts of a model in execution order, and where in them a price occurs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from planner.formulation.estimate import Item
from planner.liveness.structure import Structure

_NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")


@dataclass(slots=True)
class Section:
    """Blocks with equal region classes that run one after another, or consecutive regions of one module.

    Attributes:
        modules: FQNs of the blocks, or of the one module.
        regions: indices of the regions, those of the first block first.
        per_block: number of regions of a block.
        kind: equal for equal blocks of one list; None: the section is no block.
    """

    modules: list[str]
    regions: list[int]
    per_block: int = 0
    kind: Hashable = None


def find_sections(structure: Structure) -> list[Section]:
    """Return the sections in execution order. A block runs where its first op does."""
    sections: list[Section] = []
    for name, is_block, regions in _runs(structure):
        kind = None
        if is_block:
            classes = sorted(structure.regions.class_of[region] for region in regions)
            kind = _NUMBER.sub(r"\1*", name), tuple(classes)
        if sections and kind is not None and sections[-1].kind == kind:
            sections[-1].modules.append(name)
            sections[-1].regions += regions
        else:
            sections.append(Section(modules=[name], regions=regions, per_block=len(regions), kind=kind))
    return sections


def _runs(structure: Structure) -> list[tuple[str, bool, list[int]]]:
    """Return (FQN, whether it is a block, its regions) of each block, and of consecutive regions outside of blocks."""
    position = {op.name: number for number, op in enumerate(structure.regions.graph.ops)}
    with_ops = [region for region in structure.regions.regions if region.ops]
    runs: list[tuple[str, bool, list[int]]] = []
    of_block: dict[str, list[int]] = {}
    for region in sorted(with_ops, key=lambda region: position[region.ops[0].op.name]):
        block = structure.blocks.of_region.get(region.index)
        if block in of_block:
            of_block[block].append(region.index)
        elif block is None and runs and runs[-1][:2] == (region.fqn, False):
            runs[-1][2].append(region.index)
        else:
            runs.append((block or region.fqn, block is not None, [region.index]))
            if block is not None:
                of_block[block] = runs[-1][2]
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionShares:
    """Where prices of region classes and of FSDP groups occur.

    Attributes:
        of_class: region class -> (section, fraction of its regions there).
        section_of_block: FQN of a block -> its section.
    """

    of_class: Mapping[int, Sequence[tuple[int, float]]]
    section_of_block: Mapping[str, int]

    @classmethod
    def of(cls, structure: Structure, sections: Sequence[Section]) -> SectionShares:
        """Return the shares of the sections of ``structure``."""
        section_of = {region: number for number, section in enumerate(sections) for region in section.regions}
        # A region without ops only passes tensors on. It counts where the next region in the graph runs.
        followers = {link.producer: link.consumer for link in structure.regions.links}
        shares = {}
        for members in structure.regions.classes:
            counts: dict[int, int] = defaultdict(int)
            for member in members.members:
                counts[_placed(member, section_of, followers)] += 1
            shares[members.index] = [(section, count / len(members.members)) for section, count in counts.items()]
        blocks = {name: number for number, section in enumerate(sections) for name in section.modules}
        return cls(of_class=shares, section_of_block=blocks)

    def of_item(self, item: Item) -> Sequence[tuple[int, float]]:
        """Return the sections of an item, and the fraction of its price in each; none for what is in no section."""
        if item.group is not None:
            counts: dict[int, int] = defaultdict(int)
            for block in item.group.blocks:
                counts[self.section_of_block.get(block, 0)] += 1
            return [(section, count / item.group.count) for section, count in counts.items()]
        return () if item.region is None else self.of_class[item.region]


def _placed(region: int, section_of: Mapping[int, int], followers: Mapping[int, int]) -> int:
    """Return the section of a region, or of the first region after it that has ops; the last one if there is none."""
    seen = set()
    while region not in section_of and region in followers and region not in seen:
        seen.add(region)
        region = followers[region]
    return section_of.get(region, max(section_of.values(), default=0))
