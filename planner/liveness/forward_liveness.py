"""Live tensors at each peak candidate of inference: a forward without a backward.

A tensor is alive from the op that computes it to the last op that reads it or a view of it. The results of the model
are alive to the end. A redistributed copy is alive from its first reader to its last. A *peak candidate* is the forward
of one op. As in training (`peak_candidates`), the first two and last two members of each region class have one, at the
op with the most live bytes.

Not counted: Python may keep a tensor alive a little longer, in a local variable of the function that computed it.
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
    """The first and the last position at which each tensor of a forward is alive: ``born`` and ``dies``, by root."""

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
        """Return the unsharded bytes of activations that are alive while the op at ``position`` runs."""
        return sum(
            self._values[name].nbytes
            for name, born in self.born.items()
            if born <= position <= self.dies[name] and self._values[name].kind == "activation"
        )

    def reads(self, region: Region, entry: int) -> tuple[int, int]:
        """Return the first and the last position at which an op of ``region`` reads the ``entry``, or a view of it."""
        root = self._order.root(region.slots[entry].value.name)
        positions = [
            self._order.position[region_op.op.name]
            for region_op in region.ops
            if any(self._order.root(region.slots[slot].value.name) == root for slot in region_op.inputs)
        ]
        return min(positions, default=NEVER), max(positions, default=-1)


def forward_timeline(order: OpOrder) -> Timeline:
    """Return the peak candidates of a forward, and the tensors that are alive at each."""
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
    """Return the peak candidates of a forward, by position."""
    lifetimes = LiveRanges(order)
    positions: set[int] = set()
    for region_class in order.regions.classes:
        members = [order.regions.regions[m] for m in region_class.members]
        members = [member for member in members if member.ops]
        for region in {m.index: m for m in (*members[:ENDS], *members[-ENDS:])}.values():
            positions.add(max((order.position[r.op.name] for r in region.ops), key=lifetimes.alive_nbytes))
    return tuple(PeakCandidate(key=str(position), position=position, block=None) for position in sorted(positions))


def _classes(order: OpOrder, candidates: Sequence[PeakCandidate]) -> tuple[ClassTimeline, ...]:
    """Return, for each region class, the results of its ops that are alive at ``candidates``, and the ops that run."""
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
    """Return the lifetimes of redistributed copies, one for each set of edges that can share a copy."""
    spans = _spans(order, timeline.passed_through)
    alive: dict[tuple[int, ...], Counter[Quantity]] = defaultdict(Counter)
    for links in leaving.values():
        spans_of_readers = [spans[consumer, entry] for _, consumer, entry in links]
        first, last = min(begin for begin, _ in spans_of_readers), max(end for _, end in spans_of_readers)
        quantities = [m.quantity("activations") for m in timeline.candidates if first <= m.position <= last]
        alive[tuple(sorted({edge for edge, _, _ in links}))].update(quantities)
    return tuple(Multiplicity(edges=edges, lifetime=Lifetime.of(counts)) for edges, counts in alive.items())


def _spans(order: OpOrder, passthroughs: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return entry (region, slot) -> positions of the first and the last op that reads it.

    The ops are in the region, or in a region that the entry is passed on to.
    """
    lifetimes = LiveRanges(order)
    spans = {
        (region.index, slot): lifetimes.reads(region, slot)
        for region in order.regions.regions
        for slot, region_slot in enumerate(region.slots)
        if region_slot.origin == "entry"
    }
    steps = []
    for link in reversed(order.regions.links):  # a value that many regions pass on then needs few rounds
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
