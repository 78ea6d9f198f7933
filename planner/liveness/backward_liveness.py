"""`Timeline`, and the live tensors at each peak candidate of training.

Tensors of region classes are counted. Their bytes depend on layouts and are priced in `planner.pricing.region_memory`.
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
    """The peak candidates of a step, and the tensors that are alive at them.

    Attributes:
        candidates: the peak candidates.
        classes: for each region class, its live tensors.
        blocks: FQN of a block, checkpointed or not -> the candidates at its ops.
        uses: parameter -> positions of the ops that use it.
        savers: entry (region, slot) -> position of the first op that saves its tensor (`boundary_values.savers`).
        passed_through: (region, slot) -> the entry that the slot passes on (`boundary_values.passed_through`).
        starts, ends: FQN of a block -> position of its first op, and of its last.
        first_reads: entry (region, slot) -> position of the first op that reads it (`boundary_values.first_reads`).
        aliased_gradients: candidate's key -> values (roots) whose gradients are alive in another gradient's memory.
        throughout: lifetime of activations that are alive at all candidates except the optimizer's step.
        chunks: positions at which the chunks of an interleaved pipeline stage begin, without the first chunk.
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
    """Peak candidates as arrays, attribute by attribute. ``recomputing`` is -1 for None, and a block is a number."""

    position: Positions
    recomputed_until: Positions
    recomputing: Positions
    mid_recompute: npt.NDArray[np.bool_]
    block: Positions
    number: Mapping[str | None, int]

    @classmethod
    def of(cls, candidates: Sequence[PeakCandidate]) -> _Columns:
        """Return ``candidates`` as arrays."""
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
    """Numbers of live tensors, [slots or ops, candidates]: saved in the forward or in a recomputation, or cached."""

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
        for candidate in candidates[1:]:  # the first is the optimizer's step
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
        """Return how many tensors of slots are saved by autograd, or cached by selective checkpointing."""
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
        """Return how many tensors inside ops are saved by autograd, or cached by selective checkpointing."""
        since = self._positions(regions)
        # "- 1": the working memory of an op that is being recomputed includes the cached tensors inside it.
        return self._alive(blocks, since, since - 1)

    def _running(self, regions: Sequence[Region]) -> dict[str, Counts]:
        """Return, by op and candidate, in how many regions the op's backward runs, and in how many it is recomputed."""
        candidates, position = self._columns, self._positions(regions)[:, :, None]
        works = (candidates.position == position) & (candidates.recomputing < 0)
        runs = candidates.mid_recompute & (candidates.recomputing == position)
        return {"backward_runs": works.sum(0).astype(np.float64), "recompute_runs": runs.sum(0).astype(np.float64)}

    def _positions(self, regions: Sequence[Region]) -> Positions:
        rows = [[self._order.position[region_op.op.name] for region_op in region.ops] for region in regions]
        return np.array(rows, np.int64).reshape(len(regions), len(regions[0].ops))

    def _alive(self, blocks: Sequence[str | None], since: Positions, product: Positions) -> _Alive:
        """Return how many tensors of each slot, or inside each op, are alive at each candidate.

        Args:
            blocks: for each region, the checkpointed block that it is in; None: it is in none.
            since: [regions, slots or ops]: position of the op that saves the tensor; `NEVER`: none does.
            product: [regions, slots or ops]: position of the op whose result selective checkpointing caches; `NEVER`:
                the tensor is not cached.
        """
        candidates = self._columns
        again = np.array([block is not None for block in blocks])
        home = np.array([candidates.number.get(block, -2) for block in blocks])[:, None, None]
        here = candidates.block == home
        saved = (candidates.position >= since[~again, :, None]).sum(0)
        recomputed = (here[again] & (candidates.recomputed_until >= since[again, :, None])).sum(0)
        # During the recomputation of its block, a cached tensor is alive until its op takes it from the cache.
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
        """Return region -> (slot, index of candidate) of tensors that are alive in a recomputation, but not saved."""
        slots_by_region: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for column, candidate in enumerate(candidates):
            for region, slots in self._unsaved(candidate).items():
                slots_by_region[region] += [(slot, column) for slot in slots]
        return slots_by_region

    def _unsaved(self, candidate: PeakCandidate) -> Mapping[int, tuple[int, ...]]:
        """Return region -> slots of tensors that are alive while ``candidate`` recomputes an op, but not saved.

        They are the results of the ops at ``candidate.position`` and ``candidate.recomputing`` (not in mid-recompute),
        and results of earlier ops that the recomputed op or a later one reads. The latter count at the slot, and so in
        the layout, of the next op that reads them.
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
        """Add root -> (region, slot) of the inputs or outputs of an op.

        Only roots in ``among`` are added (None: all), and only those that ``slot_by_root`` lacks.
        """
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
    """Return the peak candidates of training, and the tensors that are alive at each."""
    return _Builder(order).build()
