"""Multiplicity of each redistribution and saved tensor of a step, before any layout is chosen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.ilp.quantities import NEVER_ALIVE, Lifetime, Quantity
from planner.liveness.backward_liveness import Timeline
from planner.liveness.op_order import NEVER
from planner.liveness.peak_candidates import PeakCandidate
from planner.plan.job import CheckpointingMode
from planner.profile.op_profile import GraphProfile
from planner.regions.blocks import Blocks
from planner.regions.regions import RegionGraph

Link = tuple[int, int, int]
"""Where a tensor goes that leaves a region: edge, region and entry there."""

OutgoingLinks = Mapping[tuple[int, int], list[Link]]
"""(producer region, slot) -> its links: (edge, consumer region, entry slot of the consumer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplicity:
    """How often a redistribution or a saved tensor occurs, for one set of edges whose consumers read the same tensor.

    Attributes:
        edges: indices of the edges.
        count: number of redistributions in a micro-batch.
        lifetime: lifetime of the saved tensors: how many are alive at each peak candidate.
        in_producer_layout: whether the tensor is saved in its producer's layout, whatever layouts its consumers use.
        live_after_forward: how many saved tensors are alive at the end of the forward.
        reallgathered_lifetime: lifetime of copies that are all-gathered again in the backward instead of being saved.
            Valid where one op saves each copy.
    """

    edges: tuple[int, ...]
    count: int = 0
    lifetime: Lifetime = NEVER_ALIVE
    in_producer_layout: bool = False
    live_after_forward: int = 0
    reallgathered_lifetime: Lifetime = NEVER_ALIVE


class _Save(NamedTuple):
    """A tensor, or a redistributed copy of it, that is alive for the backward of the consumer at the end of an edge.

    Attributes:
        since: position of the op in whose backward it is read first; it is alive from the forward until then.
        block: the checkpointed block whose recomputation makes it; None: it is saved by the forward.
        in_producer_layout: whether it is saved before it is redistributed.
    """

    edge: int
    since: int
    block: str | None = None
    in_producer_layout: bool = False


class _Alive:
    """How many saved tensors are alive at each peak candidate, and at the end of the forward."""

    def __init__(self) -> None:
        self.quantities: Counter[Quantity] = Counter()
        self.after_forward = 0


class MultiplicityCounter:
    """Counts redistributions and saves of the tensors that leave regions, by the set of edges that share one."""

    def __init__(
        self,
        regions: RegionGraph,
        profile: GraphProfile,
        blocks: Blocks,
        modes: Mapping[str, CheckpointingMode],
        leaving: OutgoingLinks,
        timeline: Timeline,
    ) -> None:
        self._regions = regions
        self._profile = profile
        self._leaving = leaving
        self._timeline = timeline
        self._recomputed_in = {region: block for region, block in blocks.of_region.items() if block in modes}
        self._saved_at = [(candidate.position, candidate.quantity("activations")) for candidate in timeline.candidates]
        self._recomputed_at: dict[str, list[tuple[int, Quantity]]] = defaultdict(list)
        for candidate in timeline.candidates:
            if candidate.block is not None:
                self._recomputed_at[candidate.block].append(
                    (candidate.recomputed_until, candidate.quantity("recomputed_block"))
                )
        self._redistributions: Counter[tuple[int, ...]] = Counter()
        self._recomputed: Counter[tuple[int, ...]] = Counter()
        self._tensors: dict[tuple[tuple[int, ...], bool], _Alive] = defaultdict(_Alive)
        self._copies: dict[tuple[int, ...], _Alive] = defaultdict(_Alive)
        self._reallgathered: dict[tuple[int, ...], Counter[Quantity]] = defaultdict(Counter)
        self._gradients: dict[tuple[int, ...], Counter[Quantity]] = defaultdict(Counter)

    def count(self) -> dict[str, tuple[Multiplicity, ...]]:
        """Return attribute of `Structure` -> multiplicities of redistributions, saved tensors, copies or gradients."""
        for (producer, slot), links in self._leaving.items():
            self._count_redistributions(links)
            self._count_shared_gradients(producer, slot, links)
            self._count_saved(producer, slot, links)
        return {
            "redistributions": tuple(Multiplicity(edges=edges, count=n) for edges, n in self._redistributions.items()),
            "recomputed_redistributions": tuple(
                Multiplicity(edges=edges, count=n) for edges, n in self._recomputed.items()
            ),
            "saved_tensors": tuple(
                Multiplicity(
                    edges=edges,
                    in_producer_layout=in_producer_layout,
                    lifetime=Lifetime.of(alive.quantities),
                    live_after_forward=alive.after_forward,
                )
                for (edges, in_producer_layout), alive in self._tensors.items()
            ),
            "saved_copies": tuple(
                Multiplicity(
                    edges=edges,
                    lifetime=Lifetime.of(alive.quantities),
                    live_after_forward=alive.after_forward,
                    reallgathered_lifetime=Lifetime.of(self._reallgathered.get(edges, {})),
                )
                for edges, alive in self._copies.items()
            ),
            "shared_gradients": tuple(
                Multiplicity(edges=edges, lifetime=Lifetime.of(alive)) for edges, alive in self._gradients.items()
            ),
        }

    def _count_redistributions(self, links: Sequence[Link]) -> None:
        """Count one redistribution for all consumers together, and one for each checkpointed block that recomputes it.

        A checkpointed block shares no redistribution with other consumers, because it recomputes its own.
        """
        shared: dict[str | None, list[int]] = defaultdict(list)
        for edge, consumer, position in links:
            shared[self._redistributed_in(consumer, position)].append(edge)
        for block, edges in shared.items():
            self._redistributions[_subset(edges)] += 1
            if block is not None:
                self._recomputed[_subset(edges)] += 1

    def _count_shared_gradients(self, producer: int, slot: int, links: Sequence[Link]) -> None:
        """Count the gradient of a tensor where it waits for redistribution in memory shared with other gradients."""
        region = self._regions.regions[producer]
        if region.slots[slot].origin != "op":
            return
        alive = self._shared_gradient_at(producer, slot, links)
        if alive:
            edges = _subset(edge for edge, _, _ in links)
            self._gradients[edges].update(candidate.quantity("transient") for candidate in alive)

    def _count_saved(self, producer: int, slot: int, links: Sequence[Link]) -> None:
        """Count a tensor that leaves a region, and its redistributed copies, where they are saved for backward."""
        region = self._regions.regions[producer]
        home = self._recomputed_in.get(producer)
        saved_here = self._self_saved(producer, slot)
        owned = region.slots[slot].origin == "op" and (producer, slot) not in self._timeline.passed_through
        tensors: dict[tuple[str | None, bool], list[_Save]] = defaultdict(list)
        copies: dict[str | None, list[_Save]] = defaultdict(list)
        for link in links:
            for save in self._saved_copies(link, home, saved_here):
                copies[save.block].append(save)
            for save in self._saved_tensors(link, home, saved_here):
                tensors[save.block, save.in_producer_layout].append(save)
        for (block, in_producer_layout), saves in tensors.items():
            if owned and not (saved_here and (block is None) == (home is None)):
                alive = self._tensors[_subset(save.edge for save in saves), in_producer_layout]
                self._add(alive, saves, block)
        for block, saves in copies.items():
            edges = _subset(save.edge for save in saves)
            self._add(self._copies[edges], saves, block)
            if block is None:
                self._reallgathered[edges].update(_while_read(saves, self._timeline.candidates))

    def _saved_tensors(self, link: Link, home: str | None, saved_here: bool) -> Iterator[_Save]:
        """Yield each save of the tensor itself that the consumer of ``link`` causes."""
        edge, consumer, position = link
        block, since = self._recomputed_in.get(consumer), self._timeline.savers[consumer, position]
        if block is not None and block != home:
            # The block saves its input. It recomputes a redistribution that is inside the block.
            inside = self._redistributed_in(consumer, position) is not None
            yield _Save(edge, self._timeline.starts[block], None, inside)
        elif since < NEVER:
            further = self._saved_further(link, saved_here)
            if further:
                # Regions further down save the tensor, as it arrives there, if it is not redistributed on the way.
                yield from (_Save(e, self._timeline.savers[c, i], block) for e, c, i in further if self._is_saved(c, i))
            else:
                yield _Save(edge, since, block)

    def _saved_copies(self, link: Link, home: str | None, saved_here: bool) -> Iterator[_Save]:
        """Yield each save of a redistributed copy that the consumer of ``link`` causes."""
        edge, consumer, position = link
        block, since = self._recomputed_in.get(consumer), self._timeline.savers[consumer, position]
        inside = self._redistributed_in(consumer, position) is not None
        if inside:
            outside = self._saved_by_others(consumer, position)
            if outside < NEVER:
                yield _Save(edge, outside)
        if block is not None and block != home:
            if not inside:
                yield _Save(edge, self._timeline.starts[block])
            elif since < NEVER:
                yield _Save(edge, since, block)
        elif since < NEVER and not self._saved_further(link, saved_here):
            yield _Save(edge, since, block)

    def _saved_further(self, link: Link, saved_here: bool) -> list[Link]:
        """Return the links to regions that save a tensor which the consumer of ``link`` passes on.

        There are none if the consumer saves the tensor itself, or if one of these regions is in another checkpointed
        block.
        """
        _, consumer, position = link
        if saved_here or self._self_saved(consumer, position):
            return []
        further = list(self._further(consumer, position))
        block = self._recomputed_in.get(consumer)
        return further if all(self._recomputed_in.get(c) == block for _, c, _ in further) else []

    def _self_saved(self, region: int, position: int) -> bool:
        """Return whether an op of ``region`` saves the tensor of the slot ``position``."""
        root = self._profile.root[self._regions.regions[region].slots[position].value.name]
        return any(root in self._profile.ops[o.op.name].saved for o in self._regions.regions[region].ops)

    def _passed_on(self, region: int, entry: int) -> Iterator[Link]:
        """Yield the links of an entry that ``region`` passes on."""
        for slot in range(len(self._regions.regions[region].slots)):
            if self._timeline.passed_through.get((region, slot)) == entry:
                yield from self._leaving.get((region, slot), ())

    def _further(self, region: int, entry: int) -> Iterator[Link]:
        """Yield the links to regions that save an entry which ``region`` passes on, directly or through others."""
        for edge, consumer, position in self._passed_on(region, entry):
            if self._self_saved(consumer, position):
                yield edge, consumer, position
            else:
                yield from self._further(consumer, position)

    def _saved_by_others(self, region: int, entry: int) -> int:
        """Return the first position at which other blocks save an entry that ``region`` passes on; or `NEVER`."""
        home, since = self._recomputed_in.get(region), NEVER
        for _, consumer, position in self._passed_on(region, entry):
            block = self._recomputed_in.get(consumer)
            if block != home:
                first_saver = (
                    self._timeline.savers[consumer, position] if block is None else self._timeline.starts[block]
                )
                since = min(since, first_saver)
        return since

    def _shared_gradient_at(self, producer: int, slot: int, links: Sequence[Link]) -> list[PeakCandidate]:
        """Return the candidates at which a tensor's gradient is alive in shared memory and is redistributed.

        Autograd runs the backward in reverse order. If a reader's module redistributes the tensor at its input, the
        gradient's redistribution follows the backward of all readers. If the producer's module redistributes it at its
        output, the gradient's redistribution comes just before the producer's backward.
        """
        regions, timeline = self._regions, self._timeline
        name = regions.regions[producer].slots[slot].value.name
        candidates = [c for c in timeline.candidates if name in timeline.aliased_gradients[c.key]]
        boundaries = (regions.regions[consumer].slots[position].boundary for _, consumer, position in links)
        if any(boundary is not None and boundary.direction == "input" for boundary in boundaries):
            first = min(timeline.first_reads[consumer, position] for _, consumer, position in links)
            return [candidate for candidate in candidates if candidate.position < first]
        ops, root = regions.graph.ops, self._profile.root
        return [c for c in candidates if c.position >= 0 and name in {root[o] for o in ops[c.position].outputs}]

    def _is_saved(self, consumer: int, position: int) -> bool:
        return self._timeline.savers[consumer, position] < NEVER

    def _redistributed_in(self, consumer: int, position: int) -> str | None:
        """Return the checkpointed block inside which an entry of a region is redistributed; None: in no such block."""
        block = self._recomputed_in.get(consumer)
        if block is None:
            return None
        boundary = self._regions.regions[consumer].slots[position].boundary
        assert boundary is not None
        is_inside = self._regions.graph.calls[boundary.call].fqn.startswith(f"{block}.")  # not the block's own boundary
        return block if is_inside else None

    def _add(self, alive: _Alive, saves: Sequence[_Save], block: str | None) -> None:
        """Count one saved tensor for all ``saves``, alive since the recomputation of ``block`` (None: the forward)."""
        since = min(save.since for save in saves)
        candidates = self._saved_at if block is None else self._recomputed_at.get(block, ())
        alive.quantities.update(quantity for position, quantity in candidates if position >= since)
        alive.after_forward += block is None and since < NEVER


def _subset(edges: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(edges)))


def _while_read(saves: Sequence[_Save], candidates: Sequence[PeakCandidate]) -> list[Quantity]:
    """Return the quantities of the candidates from the backward of a tensor's last saver to that of its first saver."""
    first, last = min(save.since for save in saves), max(save.since for save in saves)
    return [candidate.quantity("transient") for candidate in candidates if first <= candidate.position <= last]
