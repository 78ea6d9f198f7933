"""What is alive at each moment at which memory may be at its peak.

Counted are tensors of classes of regions, not bytes: those depend on layouts, and are priced in `planner.costs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.blocks import Blocks
from planner.handed_on import first_reads, handed_on, savers
from planner.job import CheckpointingMode
from planner.moments import Moment, find_moments
from planner.op_order import NEVER, OpOrder
from planner.profile import GraphProfile
from planner.regions import Region, RegionGraph

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTimeline:
    """How many members of a class of regions have what alive, by moment.

    Attributes:
        saved: [slots, moments]: autograd keeps the slot's tensor, from the forward on.
        recomputed: [slots, moments]: it keeps the tensor since its block was run again.
        saved_extra, recomputed_extra: [ops, moments]: likewise, of tensors that exist only inside an op.
        cached_extra: [ops, moments]: of these, results that selective checkpointing caches.
        gradients: [slots, moments]: the gradient of the slot's tensor is there.
        works: [ops, moments]: the op's own backward runs.
        runs: [ops, moments]: the op's own forward runs again.
        held, held_extra: [slots] and [ops]: of ``saved`` and ``saved_extra``, at the end of the forward.
        held_cached: [ops]: of ``cached_extra`` likewise.
    """

    saved: Counts
    recomputed: Counts
    saved_extra: Counts
    recomputed_extra: Counts
    cached_extra: Counts
    gradients: Counts
    works: Counts
    runs: Counts
    held: Counts
    held_extra: Counts
    held_cached: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Moments of a step, and what each class of regions and each parameter has alive at them.

    Attributes:
        blocks: block that a moment's op is in, checkpointed or not -> the moments.
        uses: parameter -> positions of the ops that use it.
        savers: entry (region, slot) -> position of the first op that keeps its tensor.
        handed_on: (region, slot) -> entry of the region that the slot is, or is a view of that no other block reads.
        starts, ends: block -> position of its first op, and of its last.
        first_reads: value -> position of the first op that reads it, views left out.
        passed: moment's key -> values whose gradients are there, in memory that they share with another's.
    """

    moments: tuple[Moment, ...]
    classes: tuple[ClassTimeline, ...]
    blocks: Mapping[str, tuple[Moment, ...]]
    uses: Mapping[str, tuple[int, ...]]
    savers: Mapping[tuple[int, int], int]
    handed_on: Mapping[tuple[int, int], int]
    starts: Mapping[str, int]
    ends: Mapping[str, int]
    first_reads: Mapping[str, int]
    passed: Mapping[str, frozenset[str]]


class _Builder:
    def __init__(self, order: OpOrder) -> None:
        self._order, self._regions, self._profile = order, order.regions, order.profile
        self._waiting: dict[str, Mapping[int, tuple[int, ...]]] = {}

    def build(self) -> Timeline:
        moments = find_moments(self._order)
        in_blocks: dict[str, list[Moment]] = defaultdict(list)
        for moment in moments[1:]:  # the first is the update
            block = self._order.block_of_op(moment.position)
            if block is not None:
                in_blocks[block].append(moment)
        uses: dict[str, list[int]] = defaultdict(list)
        for region in self._regions.regions:
            for region_op in region.ops:
                for slot in (region.slots[i] for i in region_op.inputs):
                    if slot.origin == "parameter":
                        uses[slot.value.name].append(self._order.position[region_op.op.name])
        handed = handed_on(self._order)
        return Timeline(
            moments=moments,
            classes=tuple(self._of_class(c.members, moments) for c in self._regions.classes),
            blocks={block: tuple(found) for block, found in in_blocks.items()},
            uses={name: tuple(positions) for name, positions in uses.items()},
            savers=savers(self._order, handed),
            handed_on=handed,
            starts=self._order.starts,
            ends=self._order.ends,
            first_reads=first_reads(self._order),
            passed={moment.key: self._order.passed.get(moment.position, frozenset()) for moment in moments},
        )

    def _of_class(self, members: tuple[int, ...], moments: tuple[Moment, ...]) -> ClassTimeline:
        first = self._regions.regions[members[0]]
        at_end = Moment(key="end", position=len(self._order.ops), block=None)
        moments = (*moments, at_end)
        by_slot = {role: np.zeros((len(first.slots), len(moments))) for role in ("saved", "recomputed", "gradients")}
        names = ("saved_extra", "recomputed_extra", "cached_extra", "works", "runs")
        by_op = {role: np.zeros((len(first.ops), len(moments))) for role in names}
        for member in members:
            region = self._regions.regions[member]
            block = self._order.block(member)
            self._add_saved(region, block, moments, by_slot)
            self._add_inside_ops(region, block, moments, by_op)
            self._add_gradients(region, moments, by_slot["gradients"])
            self._add_unkept(region, moments, by_slot["recomputed"])
        held = {"held": by_slot["saved"], "held_extra": by_op["saved_extra"], "held_cached": by_op["cached_extra"]}
        counts = {role: found[:, :-1].copy() for role, found in (*by_slot.items(), *by_op.items())}
        return ClassTimeline(**counts, **{role: found[:, -1] for role, found in held.items()})

    def _add_saved(
        self, region: Region, block: str | None, moments: tuple[Moment, ...], into: Mapping[str, Counts]
    ) -> None:
        saver: dict[str, int] = {}
        for region_op in region.ops:
            for name in self._profile.ops[region_op.op.name].saved:
                saver.setdefault(name, self._order.position[region_op.op.name])
        for region_op in region.ops:
            cached = self._is_selective(block) and self._profile.ops[region_op.op.name].flops > 0
            for slot in region_op.outputs:
                name = region.slots[slot].value.name
                if self._profile.root[name] != name:
                    continue
                self._add_row(into["saved"][slot], into["recomputed"][slot], saver.get(name, NEVER), block, moments)
                if block is not None and cached:
                    into["saved"][slot] += self._cached(block, moments, self._order.position[region_op.op.name])

    def _add_inside_ops(
        self, region: Region, block: str | None, moments: tuple[Moment, ...], into: Mapping[str, Counts]
    ) -> None:
        for index, region_op in enumerate(region.ops):
            position = self._order.position[region_op.op.name]
            self._add_row(into["saved_extra"][index], into["recomputed_extra"][index], position, block, moments)
            if block is not None and self._is_selective(block):
                # Of what is inside an op that runs again, its working memory counts all.
                into["cached_extra"][index] += self._cached(block, moments, position - 1)
            into["works"][index] += [moment.position == position and moment.again is None for moment in moments]
            into["runs"][index] += [moment.midway and moment.again == position for moment in moments]

    def _is_selective(self, block: str | None) -> bool:
        return block is not None and self._order.modes[block] == "selective"

    def _cached(self, block: str, moments: tuple[Moment, ...], position: int) -> list[bool]:
        """Return at which moments the cache of a block holds a product of the op at ``position``.

        While the block runs again, each op takes its own from there.
        """
        start = self._order.starts[block]
        return [m.midway and position > m.made if m.block == block else m.position >= start for m in moments]

    @staticmethod
    def _add_row(saved: Counts, recomputed: Counts, since: int, block: str | None, moments: tuple[Moment, ...]) -> None:
        if block is None:
            saved += [moment.position >= since for moment in moments]
        else:
            recomputed += [moment.block == block and moment.made >= since for moment in moments]

    def _add_gradients(self, region: Region, moments: tuple[Moment, ...], into: Counts) -> None:
        made_here = {region.slots[slot].value.name: slot for region_op in region.ops for slot in region_op.outputs}
        made_here |= {s.value.name: i for i, s in enumerate(region.slots) if s.origin == "entry" and s.source is None}
        for column, moment in enumerate(moments):
            for name in self._order.gradients.get(moment.position, ()):
                if name in made_here:
                    into[made_here[name], column] += 1
        for region_op in region.ops:
            position = self._order.position[region_op.op.name]
            columns = [c for c, moment in enumerate(moments) if moment.position == position and moment.again is None]
            for column in columns:
                for slot in region_op.inputs:
                    value = region.slots[slot].value
                    makes = value.kind == "parameter" or not self._order.passes_on(region_op.op)
                    if value.requires_grad and makes:
                        into[slot, column] += 1

    def _add_unkept(self, region: Region, moments: tuple[Moment, ...], into: Counts) -> None:
        """Count what is there of a block that is run again although autograd does not keep it."""
        for column, moment in enumerate(moments):
            for slot in self._unkept(moment).get(region.index, ()):
                into[slot, column] += 1

    def _unkept(self, moment: Moment) -> Mapping[int, tuple[int, ...]]:
        """Return region -> slots whose tensors an op that runs again makes or reads, or that wait for a later op.

        What waits is as its next reader sees it; but what was made last is there as it was made.
        """
        if moment.again is None or moment.block is None:
            return {}
        if moment.key not in self._waiting:
            inside = self._order.inside[moment.block]
            done = [p for p in inside if p <= moment.made]
            kept = {name for p in done for name in self._profile.ops[self._order.ops[p].name].saved}
            made = {self._order.root(name) for p in inside if p < moment.again for name in self._order.ops[p].outputs}
            found: dict[str, tuple[int, int]] = {}
            for position in sorted({moment.position, moment.again}) if not moment.midway else ():
                self._note(position, "outputs", found)
            for position in (p for p in inside if p >= moment.again):
                self._note(position, "inputs", found, among=made)
            slots: dict[int, list[int]] = defaultdict(list)
            for name, (region, slot) in found.items():
                if name not in kept:
                    slots[region].append(slot)
            self._waiting[moment.key] = {region: tuple(found) for region, found in slots.items()}
        return self._waiting[moment.key]

    def _note(self, position: int, side: str, found: dict[str, tuple[int, int]], among: set[str] | None = None) -> None:
        """Note by root where the tensors of an op are seen, first come first kept."""
        region, region_op = self._order.region_op[position]
        for slot in region_op.outputs if side == "outputs" else region_op.inputs:
            name = self._order.root(region.slots[slot].value.name)
            if among is None or name in among:
                found.setdefault(name, (region.index, slot))


def build_timeline(
    regions: RegionGraph, profile: GraphProfile, blocks: Blocks, modes: Mapping[str, CheckpointingMode]
) -> Timeline:
    """Return the moments at which memory may be at its peak, and what is alive at each."""
    return _Builder(OpOrder(regions, profile, blocks, modes)).build()
