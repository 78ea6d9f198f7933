"""What is alive at each moment at which memory may be at its peak.

Counted are tensors of classes of regions, not bytes: those depend on layouts, and are priced in `activation_costs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.ilp.problem import Lifetime
from planner.liveness.boundary_values import first_reads, handed_on, savers
from planner.liveness.class_timeline import ClassTimeline, Counts, throughout
from planner.liveness.op_order import NEVER, OpOrder
from planner.liveness.peak_candidates import Moment, find_moments
from planner.regions.regions import Region

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Moments of a step, and what each class of regions and each parameter has alive at them.

    Attributes:
        blocks: block that a moment's op is in, checkpointed or not -> the moments.
        uses: parameter -> positions of the ops that use it.
        savers: entry (region, slot) -> position of the first op that keeps its tensor.
        handed_on: (region, slot) -> entry of the region that the slot is, or is a view of that no other block reads.
        starts, ends: block -> position of its first op, and of its last.
        first_reads: entry (region, slot) -> position of the first op that reads it.
        passed: moment's key -> values whose gradients are there, in memory that they share with another's.
        throughout: of activations that are there at all moments but the update.
        chunks: where each stage but the first begins, of those that a rank of an interleaved pipeline has.
    """

    moments: tuple[Moment, ...]
    classes: tuple[ClassTimeline, ...]
    blocks: Mapping[str, tuple[Moment, ...]]
    uses: Mapping[str, tuple[int, ...]]
    savers: Mapping[tuple[int, int], int]
    handed_on: Mapping[tuple[int, int], int]
    starts: Mapping[str, int]
    ends: Mapping[str, int]
    first_reads: Mapping[tuple[int, int], int]
    passed: Mapping[str, frozenset[str]]
    throughout: Lifetime
    chunks: tuple[int, ...] = ()


class _Columns(NamedTuple):
    """Moments as arrays; `Moment.again` is -1 where it is None, and a block its number."""

    position: Positions
    made: Positions
    again: Positions
    midway: npt.NDArray[np.bool_]
    block: Positions
    number: Mapping[str | None, int]

    @classmethod
    def of(cls, moments: Sequence[Moment]) -> _Columns:
        """Return what ``moments`` are, attribute by attribute."""
        number: dict[str | None, int] = {None: -1}
        for moment in moments:
            number.setdefault(moment.block, len(number))
        return cls(
            position=np.array([moment.position for moment in moments]),
            made=np.array([moment.made for moment in moments]),
            again=np.array([-1 if moment.again is None else moment.again for moment in moments]),
            midway=np.array([moment.midway for moment in moments]),
            block=np.array([number[moment.block] for moment in moments]),
            number=number,
        )


class _Alive(NamedTuple):
    """How many tensors are there, by column and moment: kept all along, since their block ran again, or in a cache."""

    saved: Counts
    recomputed: Counts
    cached: Counts


class _Builder:
    def __init__(self, order: OpOrder) -> None:
        self._order, self._regions, self._profile = order, order.regions, order.profile
        self._moments = moments = find_moments(order)
        at_end = Moment(key="end", position=len(order.ops), block=None)
        self._columns = _Columns.of((*moments, at_end))
        self._again = self._made_again(moments)
        self._arrived: dict[str, list[int]] = defaultdict(list)
        self._at: dict[int, list[int]] = defaultdict(list)
        for column, moment in enumerate(moments):
            for name in order.gradients.get(moment.position, ()):
                self._arrived[name].append(column)
            if moment.again is None:
                self._at[moment.position].append(column)

    def build(self) -> Timeline:
        moments = self._moments
        in_blocks: dict[str, list[Moment]] = defaultdict(list)
        for moment in moments[1:]:  # the first is the update
            block = self._order.block_of_op(moment.position)
            if block is not None:
                in_blocks[block].append(moment)
        handed = handed_on(self._order)
        return Timeline(
            moments=moments,
            classes=tuple(self._of_class(c.members) for c in self._regions.classes),
            blocks={block: tuple(found) for block, found in in_blocks.items()},
            uses=positions_of_uses(self._order),
            savers=savers(self._order, handed),
            handed_on=handed,
            starts=self._order.starts,
            ends=self._order.ends,
            first_reads=first_reads(self._order),
            passed={moment.key: self._order.passed.get(moment.position, frozenset()) for moment in moments},
            throughout=throughout(moments),
            chunks=self._order.chunks,
        )

    def _of_class(self, members: tuple[int, ...]) -> ClassTimeline:
        regions = [self._regions.regions[member] for member in members]
        blocks = [self._order.block(member) for member in members]
        gradients = np.zeros((len(regions[0].slots), len(self._columns.position)))
        recomputed = np.zeros_like(gradients)
        for region in regions:
            self._add_gradients(region, gradients)
            for slot, column in self._again.get(region.index, ()):
                recomputed[slot, column] += 1
        by_slot = self._of_slots(regions, blocks)
        by_op = self._of_ops(regions, blocks)
        saved = by_slot.saved + by_slot.cached
        counts = {
            "saved": saved,
            "recomputed": by_slot.recomputed + recomputed,
            "saved_extra": by_op.saved,
            "recomputed_extra": by_op.recomputed,
            "cached_extra": by_op.cached,
            "gradients": gradients,
            **self._running(regions),
        }
        # The last column is the end of the forward, which is no moment.
        return ClassTimeline(
            moments=self._moments,
            **{role: found[:, :-1].copy() for role, found in counts.items()},
            held=saved[:, -1],
            held_extra=by_op.saved[:, -1],
            held_cached=by_op.cached[:, -1],
        )

    def _of_slots(self, regions: Sequence[Region], blocks: Sequence[str | None]) -> _Alive:
        """Return at which moments autograd, or a cache, has the tensors of slots."""
        since = np.full((len(regions), len(regions[0].slots)), NEVER)
        cached = np.full(since.shape, NEVER)
        for row, region in enumerate(regions):
            saver: dict[str, int] = {}
            for region_op in region.ops:
                for name in self._profile.ops[region_op.op.name].saved:
                    saver.setdefault(name, self._order.position[region_op.op.name])
            for region_op in region.ops:
                is_product = self._profile.ops[region_op.op.name].flops > 0
                for slot in region_op.outputs:
                    name = region.slots[slot].value.name
                    if self._profile.root[name] == name:
                        since[row, slot] = saver.get(name, NEVER)
                        if is_product:
                            cached[row, slot] = self._order.position[region_op.op.name]
        return self._alive(blocks, since, cached)

    def _of_ops(self, regions: Sequence[Region], blocks: Sequence[str | None]) -> _Alive:
        """Return at which moments autograd, or a cache, has what exists only inside ops."""
        since = self._positions(regions)
        # Of what is inside an op that runs again, its working memory counts all.
        return self._alive(blocks, since, since - 1)

    def _running(self, regions: Sequence[Region]) -> dict[str, Counts]:
        """Return at which moments the ops of regions run, backward and again."""
        moments, position = self._columns, self._positions(regions)[:, :, None]
        works = (moments.position == position) & (moments.again < 0)
        runs = moments.midway & (moments.again == position)
        return {"works": works.sum(0).astype(np.float64), "runs": runs.sum(0).astype(np.float64)}

    def _positions(self, regions: Sequence[Region]) -> Positions:
        rows = [[self._order.position[region_op.op.name] for region_op in region.ops] for region in regions]
        return np.array(rows, np.int64).reshape(len(regions), len(regions[0].ops))

    def _alive(self, blocks: Sequence[str | None], since: Positions, product: Positions) -> _Alive:
        """Return how many of the tensors of each column are there at each moment.

        Args:
            blocks: the checkpointed block of each row.
            since: [rows, columns]: the op that keeps the tensor.
            product: [rows, columns]: the op of which selective checkpointing caches it; `NEVER`: it does not.
        """
        moments = self._columns
        again = np.array([block is not None for block in blocks])
        home = np.array([moments.number.get(block, -2) for block in blocks])[:, None, None]
        here = moments.block == home
        saved = (moments.position >= since[~again, :, None]).sum(0)
        recomputed = (here[again] & (moments.made >= since[again, :, None])).sum(0)
        # While a block runs again, each op takes its own from its cache.
        caching = np.array([block is not None and self._order.modes[block] == "selective" for block in blocks])
        starts = np.array([0 if block is None else self._order.starts.get(block, 0) for block in blocks])[:, None, None]
        own = moments.midway & (product[:, :, None] > moments.made)
        kept = np.where(here, own, moments.position >= starts) & (product < NEVER)[:, :, None]
        cached = kept[caching].sum(0)
        return _Alive(saved.astype(np.float64), recomputed.astype(np.float64), cached.astype(np.float64))

    def _add_gradients(self, region: Region, into: Counts) -> None:
        made_here = {region.slots[slot].value.name: slot for region_op in region.ops for slot in region_op.outputs}
        made_here |= {s.value.name: i for i, s in enumerate(region.slots) if s.origin == "entry" and s.source is None}
        for name, slot in made_here.items():
            for column in self._arrived.get(name, ()):
                into[slot, column] += 1
        for region_op in region.ops:
            for column in self._at.get(self._order.position[region_op.op.name], ()):
                in_place = self._profile.ops[region_op.op.name].in_place
                for position, slot in enumerate(region_op.inputs):
                    value = region.slots[slot].value
                    makes = value.kind == "parameter" or not self._order.passes_on(region_op.op)
                    if value.requires_grad and makes and position not in in_place:
                        into[slot, column] += 1

    def _made_again(self, moments: tuple[Moment, ...]) -> dict[int, list[tuple[int, int]]]:
        """Return region -> (slot, column) of what is there of a block that is run again and autograd does not keep."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for column, moment in enumerate(moments):
            for region, slots in self._unkept(moment).items():
                found[region] += [(slot, column) for slot in slots]
        return found

    def _unkept(self, moment: Moment) -> Mapping[int, tuple[int, ...]]:
        """Return region -> slots whose tensors an op that runs again makes or reads, or that wait for a later op.

        What waits is as its next reader sees it; but what was made last is there as it was made.
        """
        if moment.again is None or moment.block is None:
            return {}
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
        return {region: tuple(found) for region, found in slots.items()}

    def _note(self, position: int, side: str, found: dict[str, tuple[int, int]], among: set[str] | None = None) -> None:
        """Note by root where the tensors of an op are seen, first come first kept."""
        region, region_op = self._order.region_op[position]
        for slot in region_op.outputs if side == "outputs" else region_op.inputs:
            name = self._order.root(region.slots[slot].value.name)
            if among is None or name in among:
                found.setdefault(name, (region.index, slot))


def positions_of_uses(order: OpOrder) -> dict[str, tuple[int, ...]]:
    """Return parameter -> positions of the ops that use it."""
    uses: dict[str, list[int]] = defaultdict(list)
    for region in order.regions.regions:
        for region_op in region.ops:
            for slot in (region.slots[i] for i in region_op.inputs):
                if slot.origin == "parameter":
                    uses[slot.value.name].append(order.position[region_op.op.name])
    return {name: tuple(positions) for name, positions in uses.items()}


def build_timeline(order: OpOrder) -> Timeline:
    """Return the moments at which memory may be at its peak, and what is alive at each."""
    return _Builder(order).build()
