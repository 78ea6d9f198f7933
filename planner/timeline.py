"""When memory is at its peak: moments of the backward pass, and what is alive at each.

A backward pass frees what autograd kept as it makes gradients, so that activations and gradients are never all there
at once. A *moment* is the backward of one op. What is alive at it: what ops up to it keep; gradients of parameters
that are used only after it; gradients of activations on their way from later ops to earlier ones; and what the op
itself makes. In a checkpointed block "up to it" means within the block, since earlier blocks have not been made
again; and there are two moments more while it is made: when the last op that keeps anything has run, and when the next
has read what that one made.

Between the first and the last of equal blocks all of that changes linearly, so that a peak is at an end: each class of
regions has moments at its first and its last two members, and there at the op at which most is alive. (Two, because the
first block has no other to gather parameters for ahead, and after the last no gradients are being reduced.)
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.blocks import Blocks
from planner.graph import Op
from planner.problem import moment_quantity
from planner.profile import GraphProfile
from planner.regions import Region, RegionGraph

Counts = npt.NDArray[np.float64]

ENDS = 2
"""Members of a class, from either end, that have moments."""

NEVER = 1 << 60
"""A position after every op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The backward of the op at ``position`` in the graph, in ``block`` where that is checkpointed.

    Attributes:
        again: the moment is just before that, as the forward of the op at this position runs again; None: it is not.
    """

    key: str
    position: int
    block: str | None
    again: int | None = None

    def quantity(self, role: str) -> str:
        """Return the name under which bytes of ``role`` that are alive at this moment add up."""
        return moment_quantity(self.key, role)


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
    """

    saved: Counts
    recomputed: Counts
    saved_extra: Counts
    recomputed_extra: Counts
    cached_extra: Counts
    gradients: Counts
    works: Counts


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


UPDATE = Moment(key="update", position=-1, block=None)
"""The optimizer's step, as if it were the backward of an op before all others: every gradient is there, and no more."""


class _Builder:
    def __init__(self, regions: RegionGraph, profile: GraphProfile, blocks: Blocks, ac: str) -> None:
        self._regions, self._profile, self._blocks, self._ac = regions, profile, blocks, ac
        self._ops: list[Op] = regions.graph.ops
        self._position = {op.name: position for position, op in enumerate(self._ops)}
        self._region_of = {r.op.name: region for region in regions.regions for r in region.ops}
        self._region_op = {self._position[r.op.name]: (region, r) for region in regions.regions for r in region.ops}
        self._inside: dict[str, list[int]] = defaultdict(list)
        self._waiting: dict[str, Mapping[int, tuple[int, ...]]] = {}
        self._starts: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        for region in regions.regions:
            block = blocks.of_region.get(region.index)
            for region_op in region.ops if block is not None else ():
                assert block is not None
                position = self._position[region_op.op.name]
                self._starts[block] = min(self._starts.get(block, NEVER), position)
                self._ends[block] = max(self._ends.get(block, -1), position)
                self._inside[block].append(position)
        for positions in self._inside.values():
            positions.sort()
        self._gradients: dict[int, tuple[str, ...]] = {}
        self._passed: dict[int, frozenset[str]] = {}
        self._follow_gradients()

    def build(self) -> Timeline:
        moments = self._moments()
        in_blocks: dict[str, list[Moment]] = defaultdict(list)
        for moment in moments[1:]:  # the first is the update
            block = self._blocks.of_region.get(self._region_of[self._ops[moment.position].name].index)
            if block is not None:
                in_blocks[block].append(moment)
        uses: dict[str, list[int]] = defaultdict(list)
        for region in self._regions.regions:
            for region_op in region.ops:
                for slot in (region.slots[i] for i in region_op.inputs):
                    if slot.origin == "parameter":
                        uses[slot.value.name].append(self._position[region_op.op.name])
        handed_on = self._handed_on()
        return Timeline(
            moments=moments,
            classes=tuple(self._of_class(c.members, moments) for c in self._regions.classes),
            blocks={block: tuple(found) for block, found in in_blocks.items()},
            uses={name: tuple(positions) for name, positions in uses.items()},
            savers=self._savers(handed_on),
            handed_on=handed_on,
            starts=self._starts,
            ends=self._ends,
            first_reads=self._first_reads(),
            passed={moment.key: self._passed.get(moment.position, frozenset()) for moment in moments},
        )

    # --- which moments -------------------------------------------------------------------------------------------

    def _moments(self) -> tuple[Moment, ...]:
        found = {UPDATE.position: UPDATE}
        for region_class in self._regions.classes:
            members = [self._regions.regions[m] for m in region_class.members]
            working = [m for m in members if any(self._works(r.op) for r in m.ops)]
            ends = {m.index: m for m in (*working[:ENDS], *working[-ENDS:])}
            for region in ends.values():
                positions = [self._position[r.op.name] for r in region.ops if self._works(r.op)]
                position = max(positions, key=lambda p: self._alive_inside(region, p))
                block = self._blocks.of_region.get(region.index) if self._ac != "none" else None
                found[position] = Moment(key=str(position), position=position, block=block)
        return (*(found[position] for position in sorted(found)), *self._ends_of_recomputation(found))

    def _ends_of_recomputation(self, found: Mapping[int, Moment]) -> Iterator[Moment]:
        """Yield the moments while a block is run again: the first op of its backward that needs it asks for that."""
        for block in dict.fromkeys(moment.block for moment in found.values() if moment.block is not None):
            keeping = [p for p in self._inside[block] if self._keeps(self._ops[p])]
            if not keeping:
                continue
            last = max(keeping)
            made = {self._root(name) for name in self._ops[last].outputs}
            reading = (p for p in self._inside[block] if p > last and made & self._reads(p) and not self._is_view(p))
            for again in (last, *itertools.islice(reading, 1)):
                yield Moment(key=f"{again}-again", position=last, block=block, again=again)

    def _keeps(self, op: Op) -> bool:
        profile = self._profile.ops[op.name]
        return bool(profile.saved or profile.saved_extra_nbytes)

    def _reads(self, position: int) -> set[str]:
        return {self._root(name) for name in self._ops[position].inputs}

    def _is_view(self, position: int) -> bool:
        return all(self._root(name) in self._reads(position) for name in self._ops[position].outputs)

    def _works(self, op: Op) -> bool:
        return any(self._regions.graph.values[name].requires_grad for name in op.outputs)

    def _alive_inside(self, region: Region, position: int) -> float:
        """Return the bytes, unsplit, that are alive of a region at a moment in it: to choose the moment by."""
        values = self._regions.graph.values
        kept: set[str] = set()
        extra = 0.0
        for region_op in region.ops:
            if self._position[region_op.op.name] <= position:
                kept.update(self._profile.ops[region_op.op.name].saved)
                extra += self._profile.ops[region_op.op.name].saved_extra_nbytes
        op = self._ops[position]
        working = self._profile.ops[op.name].backward_extra_nbytes
        activations = [name for name in kept if values[name].kind == "activation"]
        grown = [*self._gradients[position], *self._new_gradients(op)]
        return extra + working + sum(values[name].nbytes for name in (*activations, *grown))

    # --- gradients of activations --------------------------------------------------------------------------------

    def _root(self, name: str) -> str:
        return self._profile.root.get(name, name)

    def _passes_on(self, op: Op) -> bool:
        """Tell whether an op's backward hands its gradient on as it is."""
        return self._profile.ops[op.name].nbytes == 0 or op.target_name in ("aten.add.Tensor", "aten.alias.default")

    def _new_gradients(self, op: Op) -> list[str]:
        """Return the values, by root, for which the backward of ``op`` makes a gradient of its own."""
        values = self._regions.graph.values
        if self._passes_on(op):
            return []
        return [self._root(n) for n in op.inputs if values[n].requires_grad and values[n].kind == "activation"]

    def _follow_gradients(self) -> None:
        """Find, by position, the values whose gradients have come from later ops, and those that share another's."""
        values = self._regions.graph.values
        held: dict[str, str] = {}
        for position in range(len(self._ops) - 1, -1, -1):
            op = self._ops[position]
            self._gradients[position] = tuple(dict.fromkeys(held.values()))
            self._passed[position] = frozenset(name for name, owner in held.items() if name != owner)
            if not self._works(op):
                continue
            outputs = {self._root(name) for name in op.outputs}
            arrived = next((held[name] for name in outputs if name in held), None)
            made = set(self._new_gradients(op))
            sources = {self._root(n) for n in op.inputs if values[n].requires_grad and values[n].kind == "activation"}
            for name in outputs - sources:
                held.pop(name, None)
            for name in sources:
                held[name] = name if name in made or name in held or arrived is None else arrived

    # --- what a class has alive ----------------------------------------------------------------------------------

    def _of_class(self, members: tuple[int, ...], moments: tuple[Moment, ...]) -> ClassTimeline:
        first = self._regions.regions[members[0]]
        by_slot = {role: np.zeros((len(first.slots), len(moments))) for role in ("saved", "recomputed", "gradients")}
        names = ("saved_extra", "recomputed_extra", "cached_extra", "works")
        by_op = {role: np.zeros((len(first.ops), len(moments))) for role in names}
        for member in members:
            region = self._regions.regions[member]
            block = self._blocks.of_region.get(member) if self._ac != "none" else None
            self._add_saved(region, block, moments, by_slot)
            self._add_inside_ops(region, block, moments, by_op)
            self._add_gradients(region, moments, by_slot["gradients"])
            self._add_unkept(region, moments, by_slot["recomputed"])
        return ClassTimeline(**by_slot, **by_op)

    def _add_saved(
        self, region: Region, block: str | None, moments: tuple[Moment, ...], into: Mapping[str, Counts]
    ) -> None:
        saver: dict[str, int] = {}
        for region_op in region.ops:
            for name in self._profile.ops[region_op.op.name].saved:
                saver.setdefault(name, self._position[region_op.op.name])
        for region_op in region.ops:
            cached = self._ac == "selective" and self._profile.ops[region_op.op.name].flops > 0
            for slot in region_op.outputs:
                name = region.slots[slot].value.name
                if self._profile.root[name] != name:
                    continue
                self._add_row(into["saved"][slot], into["recomputed"][slot], saver.get(name, NEVER), block, moments)
                if block is not None and cached:
                    into["saved"][slot] += self._cached(block, moments)

    def _add_inside_ops(
        self, region: Region, block: str | None, moments: tuple[Moment, ...], into: Mapping[str, Counts]
    ) -> None:
        for index, region_op in enumerate(region.ops):
            position = self._position[region_op.op.name]
            self._add_row(into["saved_extra"][index], into["recomputed_extra"][index], position, block, moments)
            if block is not None and self._ac == "selective":
                into["cached_extra"][index] += self._cached(block, moments)
            into["works"][index] += [moment.position == position and moment.again is None for moment in moments]

    def _cached(self, block: str, moments: tuple[Moment, ...]) -> list[bool]:
        return [moment.block != block and moment.position >= self._starts[block] for moment in moments]

    @staticmethod
    def _add_row(saved: Counts, recomputed: Counts, since: int, block: str | None, moments: tuple[Moment, ...]) -> None:
        if block is None:
            saved += [moment.position >= since for moment in moments]
        else:
            recomputed += [moment.block == block and moment.position >= since for moment in moments]

    def _add_gradients(self, region: Region, moments: tuple[Moment, ...], into: Counts) -> None:
        made_here = {region.slots[slot].value.name: slot for region_op in region.ops for slot in region_op.outputs}
        for column, moment in enumerate(moments):
            for name in self._gradients.get(moment.position, ()):
                if name in made_here:
                    into[made_here[name], column] += 1
        for region_op in region.ops:
            position = self._position[region_op.op.name]
            columns = [c for c, moment in enumerate(moments) if moment.position == position and moment.again is None]
            for column in columns:
                for slot in region_op.inputs:
                    value = region.slots[slot].value
                    makes = value.kind == "parameter" or not self._passes_on(region_op.op)
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
            inside = self._inside[moment.block]
            done = [p for p in inside if p <= moment.position]
            kept = {name for p in done for name in self._profile.ops[self._ops[p].name].saved}
            made = {self._root(name) for p in inside if p < moment.again for name in self._ops[p].outputs}
            found: dict[str, tuple[int, int]] = {}
            for position in sorted({moment.position, moment.again}):
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
        region, region_op = self._region_op[position]
        for slot in region_op.outputs if side == "outputs" else region_op.inputs:
            name = self._root(region.slots[slot].value.name)
            if among is None or name in among:
                found.setdefault(name, (region.index, slot))

    # --- entries -------------------------------------------------------------------------------------------------

    def _first_reads(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for position in range(len(self._ops)):
            if not self._is_view(position):
                for name in self._reads(position):
                    found.setdefault(name, position)
        return found

    def _handed_on(self) -> dict[tuple[int, int], int]:
        entries = {
            (region.index, slot): slot
            for region in self._regions.regions
            for slot, seen in enumerate(region.slots)
            if seen.origin == "entry"
        }
        views: dict[tuple[int, int], int] = {}
        crossing: set[tuple[int, int]] = set()
        for link in self._regions.links:
            place = link.producer, link.producer_slot
            region = self._regions.regions[link.producer]
            root = self._root(region.slots[link.producer_slot].value.name)
            if self._block(link.producer) != self._block(link.consumer):
                crossing.add(place)
            elif place not in entries and place not in views:
                behind = (i for i, seen in enumerate(region.slots) if self._root(seen.value.name) == root)
                entry = next((i for i in behind if region.slots[i].origin == "entry"), None)
                if entry is not None:
                    views[place] = entry
        return entries | {place: entry for place, entry in views.items() if place not in crossing}

    def _block(self, region: int) -> str | None:
        """Return the checkpointed block that a region is in."""
        return self._blocks.of_region.get(region) if self._ac != "none" else None

    def _savers(self, handed_on: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
        """Return for every entry (region, slot) the first op that keeps its tensor: there, or further down."""
        found: dict[tuple[int, int], int] = {}
        for region in self._regions.regions:
            for position, slot in enumerate(region.slots):
                if slot.origin == "entry":
                    root = self._root(slot.value.name)
                    found[region.index, position] = min(
                        (self._position[r.op.name] for r in region.ops if root in self._profile.ops[r.op.name].saved),
                        default=NEVER,
                    )
        steps = []
        for link in self._regions.links:
            entry = handed_on.get((link.producer, link.producer_slot))
            if entry is not None:
                steps.append(((link.producer, entry), (link.consumer, link.consumer_slot)))
        changed = True
        while changed:
            changed = False
            for source, target in steps:
                if found[target] < found[source]:
                    found[source] = found[target]
                    changed = True
        return found


def build_timeline(regions: RegionGraph, profile: GraphProfile, blocks: Blocks, ac: str) -> Timeline:
    """Return the moments at which memory may be at its peak, and what is alive at each."""
    return _Builder(regions, profile, blocks, ac).build()
