"""Live tensors at each peak candidate of a forward without a backward: inference.

A tensor is there from the op that makes it to the last op that reads it, or a view of it; what the forward is run for
is there to the end. A copy in another layout is there from its first reader to its last. A *peak candidate* is the
forward of one op: as of the backward (`peak_candidates`), the first and the last two members of each class of regions
have one, at the op at which most is alive.

Python may hold a tensor a little longer than its last reader, in a variable of the function that made it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from planner.ilp.quantities import Lifetime, Quantity
from planner.liveness.backward_liveness import Timeline, positions_of_uses
from planner.liveness.boundary_values import first_reads, passed_through, savers
from planner.liveness.class_timeline import ClassTimeline, throughout
from planner.liveness.multiplicity import Multiplicity, OutgoingLinks
from planner.liveness.op_order import NEVER, OpOrder
from planner.liveness.peak_candidates import ENDS, PeakCandidate
from planner.regions.regions import Region


class LiveRanges:
    """From when to when each tensor of a forward is there, by the positions of ops."""

    def __init__(self, order: OpOrder) -> None:
        self._order = order
        self.born: dict[str, int] = {}
        self.dies: dict[str, int] = {}
        for position, op in enumerate(order.ops):
            for name in op.outputs:
                self.born.setdefault(order.root(name), position)
            for name in (*op.inputs, *op.outputs):
                self.dies[order.root(name)] = position
        results = (order.root(output.value) for output in order.regions.graph.outputs if output.is_result)
        self.dies.update(dict.fromkeys(results, NEVER))
        self._values = order.regions.graph.values

    def alive_nbytes(self, position: int) -> int:
        """Return the bytes, unsplit, of what ops have made and is there while the op at ``position`` runs."""
        return sum(
            self._values[name].nbytes
            for name, born in self.born.items()
            if born <= position <= self.dies[name] and self._values[name].kind == "activation"
        )

    def reads(self, region: Region, entry: int) -> tuple[int, int]:
        """Return the first and the last position at which ops of ``region`` read what enters it, or a view of that."""
        root = self._order.root(region.slots[entry].value.name)
        positions = [
            self._order.position[region_op.op.name]
            for region_op in region.ops
            if any(self._order.root(region.slots[slot].value.name) == root for slot in region_op.inputs)
        ]
        return min(positions, default=NEVER), max(positions, default=-1)


def forward_timeline(order: OpOrder) -> Timeline:
    """Return the candidates at which the memory of a forward may be at its peak, and what is alive at each."""
    candidates, passthroughs = forward_peak_candidates(order), passed_through(order)
    return Timeline(
        candidates=candidates,
        classes=_classes(order, candidates),
        blocks={},
        uses=positions_of_uses(order),
        savers=savers(order, passthroughs),
        passed_through=passthroughs,
        starts=order.starts,
        ends=order.ends,
        first_reads=first_reads(order),
        aliased_gradients={candidate.key: frozenset() for candidate in candidates},
        throughout=throughout(candidates),
    )


def forward_peak_candidates(order: OpOrder) -> tuple[PeakCandidate, ...]:
    """Return the candidates at which the memory of a forward may be at its peak, by position."""
    lifetimes = LiveRanges(order)
    positions: set[int] = set()
    for region_class in order.regions.classes:
        members = [order.regions.regions[m] for m in region_class.members]
        members = [member for member in members if member.ops]
        for region in {m.index: m for m in (*members[:ENDS], *members[-ENDS:])}.values():
            positions.add(max((order.position[r.op.name] for r in region.ops), key=lifetimes.alive_nbytes))
    return tuple(PeakCandidate(key=str(position), position=position, block=None) for position in sorted(positions))


def _classes(order: OpOrder, candidates: Sequence[PeakCandidate]) -> tuple[ClassTimeline, ...]:
    """Return what each class of regions has alive at ``candidates``: what its ops made, and the op at work."""
    lifetimes = LiveRanges(order)
    at = np.array([candidate.position for candidate in candidates])
    timelines = []
    for region_class in order.regions.classes:
        regions = [order.regions.regions[member] for member in region_class.members]
        saved = np.zeros((len(regions[0].slots), len(at)))
        works = np.zeros((len(regions[0].ops), len(at)))
        for region in regions:
            for index, region_op in enumerate(region.ops):
                works[index] += at == order.position[region_op.op.name]
                for slot in region_op.outputs:
                    name = region.slots[slot].value.name
                    if order.root(name) == name:
                        saved[slot] += (lifetimes.born[name] <= at) & (at <= lifetimes.dies[name])
        slots, ops = np.zeros_like(saved), np.zeros_like(works)
        timelines.append(
            ClassTimeline(
                candidates=tuple(candidates),
                saved=saved,
                recomputed=slots,
                saved_extra=ops,
                recomputed_extra=ops,
                cached_extra=ops,
                gradients=slots,
                backward_runs=works,
                recompute_runs=ops,
                saved_after_forward=slots[:, 0] if len(at) else np.zeros(len(slots)),
                saved_extra_after_forward=ops[:, 0] if len(at) else np.zeros(len(ops)),
                cached_extra_after_forward=ops[:, 0] if len(at) else np.zeros(len(ops)),
            )
        )
    return tuple(timelines)


def forward_copies(order: OpOrder, timeline: Timeline, leaving: OutgoingLinks) -> tuple[Multiplicity, ...]:
    """Return at which candidates copies are there that redistributions make, by the edges that could share them."""
    spans = _spans(order, timeline.passed_through)
    alive: dict[tuple[int, ...], Counter[Quantity]] = defaultdict(Counter)
    for links in leaving.values():
        spans_of_readers = [spans[consumer, entry] for _, consumer, entry in links]
        first, last = min(begin for begin, _ in spans_of_readers), max(end for _, end in spans_of_readers)
        quantities = [m.quantity("activations") for m in timeline.candidates if first <= m.position <= last]
        alive[tuple(sorted({edge for edge, _, _ in links}))].update(quantities)
    return tuple(Multiplicity(edges=edges, lifetime=Lifetime.of(counts)) for edges, counts in alive.items())


def _spans(order: OpOrder, passthroughs: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return entry (region, slot) -> its first and last reader, there or in a region that it is passed on to."""
    lifetimes = LiveRanges(order)
    spans = {
        (region.index, slot): lifetimes.reads(region, slot)
        for region in order.regions.regions
        for slot, region_slot in enumerate(region.slots)
        if region_slot.origin == "entry"
    }
    steps = []
    for link in reversed(order.regions.links):  # a value that many regions pass on settles from the end
        entry = passthroughs.get((link.producer, link.producer_slot))
        if entry is not None:
            steps.append(((link.producer, entry), (link.consumer, link.consumer_slot)))
    changed = True
    while changed:
        changed = False
        for source, target in steps:
            wider = min(spans[source][0], spans[target][0]), max(spans[source][1], spans[target][1])
            changed |= wider != spans[source]
            spans[source] = wider
    return spans
