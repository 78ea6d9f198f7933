"""What is alive at each candidate at which memory may be at its peak.

Counted are tensors of classes of regions, not bytes: those depend on layouts, and are priced in `activation_costs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.ilp.quantities import Lifetime
from planner.liveness.boundary_values import first_reads, passed_through, savers
from planner.liveness.class_timeline import ClassTimeline, Counts, throughout
from planner.liveness.op_order import NEVER, OpOrder
from planner.liveness.peak_candidates import PeakCandidate, find_peak_candidates
from planner.regions.regions import Region

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Peak candidates of a step, and what each class of regions and each parameter has alive at them.

    Attributes:
        blocks: block that a candidate's op is in, checkpointed or not -> the candidates.
        uses: parameter -> positions of the ops that use it.
        savers: entry (region, slot) -> position of the first op that keeps its tensor.
        passed_through: (region, slot) -> entry of the region that the slot is, or that it is a view of which no other
            block reads.
        starts, ends: block -> position of its first op, and of its last.
        first_reads: entry (region, slot) -> position of the first op that reads it.
        aliased_gradients: candidate's key -> values whose gradients are alive in memory shared with another's.
        throughout: of activations that are there at all candidates but the update.
        chunks: where each stage but the first begins, of those that a rank of an interleaved pipeline has.
    """

    candidates: tuple[PeakCandidate, ...]
    classes: tuple[ClassTimeline, ...]
    blocks: Mapping[str, tuple[PeakCandidate, ...]]
    uses: Mapping[str, tuple[int, ...]]
    savers: Mapping[tuple[int, int], int]
    passed_through: Mapping[tuple[int, int], int]
    starts: Mapping[str, int]
    ends: Mapping[str, int]
    first_reads: Mapping[tuple[int, int], int]
    aliased_gradients: Mapping[str, frozenset[str]]
    throughout: Lifetime
    chunks: tuple[int, ...] = ()


class _Columns(NamedTuple):
    """Peak candidates as arrays; `PeakCandidate.recomputing` is -1 where it is None, and a block its number."""

    position: Positions
    recomputed_until: Positions
    recomputing: Positions
    mid_recompute: npt.NDArray[np.bool_]
    block: Positions
    number: Mapping[str | None, int]

    @classmethod
    def of(cls, candidates: Sequence[PeakCandidate]) -> _Columns:
        """Return what ``candidates`` are, attribute by attribute."""
        number: dict[str | None, int] = {None: -1}
        for candidate in candidates:
            number.setdefault(candidate.block, len(number))
        return cls(
            position=np.array([candidate.position for candidate in candidates]),
            recomputed_until=np.array([candidate.recomputed_until for candidate in candidates]),
            recomputing=np.array(
                [-1 if candidate.recomputing is None else candidate.recomputing for candidate in candidates]
            ),
            mid_recompute=np.array([candidate.mid_recompute for candidate in candidates]),
            block=np.array([number[candidate.block] for candidate in candidates]),
            number=number,
        )


class _Alive(NamedTuple):
    """Live tensors by column and candidate: saved from the forward on, saved in a recomputation, or cached."""

    saved: Counts
    recomputed: Counts
    cached: Counts


class _Builder:
    def __init__(self, order: OpOrder) -> None:
        self._order, self._regions, self._profile = order, order.regions, order.profile
        self._candidates = candidates = find_peak_candidates(order)
        at_end = PeakCandidate(key="end", position=len(order.ops), block=None)
        self._columns = _Columns.of((*candidates, at_end))
        self._again = self._alive_in_recompute(candidates)
        self._arrived: dict[str, list[int]] = defaultdict(list)
        self._at: dict[int, list[int]] = defaultdict(list)
        for column, candidate in enumerate(candidates):
            for name in order.gradients.get(candidate.position, ()):
                self._arrived[name].append(column)
            if candidate.recomputing is None:
                self._at[candidate.position].append(column)

    def build(self) -> Timeline:
        candidates = self._candidates
        in_blocks: dict[str, list[PeakCandidate]] = defaultdict(list)
        for candidate in candidates[1:]:  # the first is the update
            block = self._order.block_of_op(candidate.position)
            if block is not None:
                in_blocks[block].append(candidate)
        passthroughs = passed_through(self._order)
        return Timeline(
            candidates=candidates,
            classes=tuple(self._of_class(c.members) for c in self._regions.classes),
            blocks={block: tuple(block_candidates) for block, block_candidates in in_blocks.items()},
            uses=positions_of_uses(self._order),
            savers=savers(self._order, passthroughs),
            passed_through=passthroughs,
            starts=self._order.starts,
            ends=self._order.ends,
            first_reads=first_reads(self._order),
            aliased_gradients={
                candidate.key: self._order.aliased_gradients.get(candidate.position, frozenset())
                for candidate in candidates
            },
            throughout=throughout(candidates),
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
        # The last column is the end of the forward, which is no candidate.
        return ClassTimeline(
            candidates=self._candidates,
            **{role: columns[:, :-1].copy() for role, columns in counts.items()},
            saved_after_forward=saved[:, -1],
            saved_extra_after_forward=by_op.saved[:, -1],
            cached_extra_after_forward=by_op.cached[:, -1],
        )

    def _of_slots(self, regions: Sequence[Region], blocks: Sequence[str | None]) -> _Alive:
        """Return at which candidates autograd, or a cache, has the tensors of slots."""
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
        """Return at which candidates autograd, or a cache, has what exists only inside ops."""
        since = self._positions(regions)
        # Of what is inside an op that runs again, its working memory counts all.
        return self._alive(blocks, since, since - 1)

    def _running(self, regions: Sequence[Region]) -> dict[str, Counts]:
        """Return at which candidates the ops of regions run, backward and again."""
        candidates, position = self._columns, self._positions(regions)[:, :, None]
        works = (candidates.position == position) & (candidates.recomputing < 0)
        runs = candidates.mid_recompute & (candidates.recomputing == position)
        return {"backward_runs": works.sum(0).astype(np.float64), "recompute_runs": runs.sum(0).astype(np.float64)}

    def _positions(self, regions: Sequence[Region]) -> Positions:
        rows = [[self._order.position[region_op.op.name] for region_op in region.ops] for region in regions]
        return np.array(rows, np.int64).reshape(len(regions), len(regions[0].ops))

    def _alive(self, blocks: Sequence[str | None], since: Positions, product: Positions) -> _Alive:
        """Return how many of the tensors of each column are there at each candidate.

        Args:
            blocks: the checkpointed block of each row.
            since: [rows, columns]: the op that keeps the tensor.
            product: [rows, columns]: the op of which selective checkpointing caches it; `NEVER`: it does not.
        """
        candidates = self._columns
        again = np.array([block is not None for block in blocks])
        home = np.array([candidates.number.get(block, -2) for block in blocks])[:, None, None]
        here = candidates.block == home
        saved = (candidates.position >= since[~again, :, None]).sum(0)
        recomputed = (here[again] & (candidates.recomputed_until >= since[again, :, None])).sum(0)
        # While a block runs again, each op takes its own from its cache.
        caching = np.array([block is not None and self._order.modes[block] == "selective" for block in blocks])
        starts = np.array([0 if block is None else self._order.starts.get(block, 0) for block in blocks])[:, None, None]
        own = candidates.mid_recompute & (product[:, :, None] > candidates.recomputed_until)
        alive = np.where(here, own, candidates.position >= starts) & (product < NEVER)[:, :, None]
        cached = alive[caching].sum(0)
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
                    makes = value.kind == "parameter" or not self._order.passes_gradient_on(region_op.op)
                    if value.requires_grad and makes and position not in in_place:
                        into[slot, column] += 1

    def _alive_in_recompute(self, candidates: tuple[PeakCandidate, ...]) -> dict[int, list[tuple[int, int]]]:
        """Return region -> (slot, column) of what is alive in a recomputation without being saved by autograd."""
        slots_by_region: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for column, candidate in enumerate(candidates):
            for region, slots in self._unsaved(candidate).items():
                slots_by_region[region] += [(slot, column) for slot in slots]
        return slots_by_region

    def _unsaved(self, candidate: PeakCandidate) -> Mapping[int, tuple[int, ...]]:
        """Return region -> slots whose tensors an op that runs again makes or reads, or that wait for a later op.

        What waits is as its next reader sees it; but what was made last is there as it was made.
        """
        if candidate.recomputing is None or candidate.block is None:
            return {}
        inside = self._order.ops_in_block[candidate.block]
        rerun_positions = [p for p in inside if p <= candidate.recomputed_until]
        saved = {name for p in rerun_positions for name in self._profile.ops[self._order.ops[p].name].saved}
        earlier_outputs = {
            self._order.root(name) for p in inside if p < candidate.recomputing for name in self._order.ops[p].outputs
        }
        slot_by_root: dict[str, tuple[int, int]] = {}
        for position in sorted({candidate.position, candidate.recomputing}) if not candidate.mid_recompute else ():
            self._note(position, "outputs", slot_by_root)
        for position in (p for p in inside if p >= candidate.recomputing):
            self._note(position, "inputs", slot_by_root, among=earlier_outputs)
        slots: dict[int, list[int]] = defaultdict(list)
        for name, (region, slot) in slot_by_root.items():
            if name not in saved:
                slots[region].append(slot)
        return {region: tuple(region_slots) for region, region_slots in slots.items()}

    def _note(
        self, position: int, side: str, slot_by_root: dict[str, tuple[int, int]], among: set[str] | None = None
    ) -> None:
        """Note by root where the tensors of an op are seen, the first one counts."""
        region, region_op = self._order.region_op[position]
        for slot in region_op.outputs if side == "outputs" else region_op.inputs:
            name = self._order.root(region.slots[slot].value.name)
            if among is None or name in among:
                slot_by_root.setdefault(name, (region.index, slot))


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
    """Return the candidates at which memory may be at its peak, and what is alive at each."""
    return _Builder(order).build()
