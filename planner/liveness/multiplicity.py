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
from planner.regions.regions import Region, RegionGraph

OutgoingLinks = Mapping[tuple[int, int], list[tuple[int, int, int]]]
"""(region, slot) -> where it goes: edge, region and entry there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplicity:
    """How often something is paid, for one set of edges that leave the same tensor.

    Attributes:
        count: of redistributions.
        lifetime: of saved tensors: at which candidates there are how many.
        in_producer_layout: whether a saved tensor is kept as its producer makes it, whatever the consumers want.
        live_after_forward: how many saved tensors there are at the end of the forward.
        reallgathered_lifetime: of copies: at which candidates there are how many where they are all-gathered again for
            the backward of what saves them, if that is one op each.
    """

    edges: tuple[int, ...]
    count: int = 0
    lifetime: Lifetime = NEVER_ALIVE
    in_producer_layout: bool = False
    live_after_forward: int = 0
    reallgathered_lifetime: Lifetime = NEVER_ALIVE


class _Kept(NamedTuple):
    """A tensor kept for the consumer at the end of an edge, from the candidate ``since`` back to the start."""

    edge: int
    since: int


def count_multiplicities(
    regions: RegionGraph,
    profile: GraphProfile,
    blocks: Blocks,
    modes: Mapping[str, CheckpointingMode],
    leaving: OutgoingLinks,
    timeline: Timeline,
) -> dict[str, tuple[Multiplicity, ...]]:
    """Return how often redistributions and saved copies occur, by the names that they have in `Structure`."""
    saves, present = timeline.savers, _Alive(timeline.candidates)
    again_in = {region: block for region, block in blocks.of_region.items() if block in modes}
    forward: Counter[tuple[int, ...]] = Counter()
    recompute: Counter[tuple[int, ...]] = Counter()
    kept: dict[tuple[tuple[int, ...], bool], Counter[Quantity]] = defaultdict(Counter)
    kept_held: Counter[tuple[tuple[int, ...], bool]] = Counter()
    copied: dict[tuple[int, ...], Counter[Quantity]] = defaultdict(Counter)
    copied_held: Counter[tuple[int, ...]] = Counter()
    copied_again: dict[tuple[int, ...], Counter[Quantity]] = defaultdict(Counter)
    passed: dict[tuple[int, ...], Counter[Quantity]] = defaultdict(Counter)
    for (producer, slot), links in leaving.items():
        region = regions.regions[producer]
        home = again_in.get(producer)
        own = _self_saved(regions, profile, region, slot)
        together: dict[str | None, list[int]] = defaultdict(list)
        again: dict[str, list[int]] = defaultdict(list)
        keepers: dict[tuple[str | None, bool], list[_Kept]] = defaultdict(list)
        copiers: dict[str | None, list[_Kept]] = defaultdict(list)
        for edge, consumer, position in links:
            block = again_in.get(consumer)
            inside = block is not None and _hook_inside(regions, regions.regions[consumer], position, block)
            together[block if inside else None].append(edge)
            if block is not None and inside:
                again[block].append(edge)
            since = saves[consumer, position]
            within = _Kept(edge, since)
            outside = _kept_by_others(regions, again_in, leaving, timeline, consumer, position) if inside else NEVER
            if outside < NEVER:
                copiers[None].append(_Kept(edge, outside))
            further = [] if own else list(_further(regions, profile, leaving, timeline, consumer, position))
            if block is not None and block != home:
                # The block keeps what it is called with; what it makes of that inside, it makes again.
                whole = _Kept(edge, timeline.starts[block])
                keepers[None, inside].append(whole)
                if not inside:
                    copiers[None].append(whole)
                elif since < NEVER:
                    copiers[block].append(within)
            elif since < NEVER:
                apart = further and all(again_in.get(c) == block for _, c, _ in further)
                if apart and not _self_saved(regions, profile, regions.regions[consumer], position):
                    # Others keep it, further down: as it is there, if it has not been redistributed on the way.
                    keepers[block, False] += [_Kept(e, saves[c, i]) for e, c, i in further if saves[c, i] < NEVER]
                else:
                    copiers[block].append(within)
                    keepers[block, False].append(within)
        # A checkpointed block shares nothing with others: its recomputation has to stand alone.
        for edges in together.values():
            forward[_subset(edges)] += 1
        for edges in again.values():
            recompute[_subset(edges)] += 1
        is_made = region.slots[slot].origin == "op"
        owns = is_made and (producer, slot) not in timeline.passed_through
        there = [m.quantity("transient") for m in _passed_at(regions, profile, timeline, region, slot, links)]
        if is_made and there:
            passed[_subset(edge for edge, _, _ in links)].update(there)
        for (where, always), found in keepers.items():
            if owns and not (own and (where is None) == (home is None)):
                kept[_subset(k.edge for k in found), always].update(present.of(found, where))
                kept_held[_subset(k.edge for k in found), always] += _is_held(found, where)
        for where, found in copiers.items():
            copied[_subset(k.edge for k in found)].update(present.of(found, where))
            copied_held[_subset(k.edge for k in found)] += _is_held(found, where)
            if where is None:
                copied_again[_subset(k.edge for k in found)].update(_while_read(found, timeline.candidates))
    return {
        "redistributions": tuple(Multiplicity(edges=edges, count=n) for edges, n in forward.items()),
        "recomputed_redistributions": tuple(Multiplicity(edges=edges, count=n) for edges, n in recompute.items()),
        "saved_tensors": tuple(
            Multiplicity(
                edges=edges,
                in_producer_layout=always,
                lifetime=Lifetime.of(alive),
                live_after_forward=kept_held[edges, always],
            )
            for (edges, always), alive in kept.items()
        ),
        "saved_copies": tuple(
            Multiplicity(
                edges=edges,
                lifetime=Lifetime.of(alive),
                live_after_forward=copied_held[edges],
                reallgathered_lifetime=Lifetime.of(copied_again.get(edges, {})),
            )
            for edges, alive in copied.items()
        ),
        "shared_gradients": tuple(
            Multiplicity(edges=edges, lifetime=Lifetime.of(alive)) for edges, alive in passed.items()
        ),
    }


def _subset(edges: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(edges)))


class _Alive:
    """At which candidates tensors are there: made again in a block, or kept all along."""

    def __init__(self, candidates: Sequence[PeakCandidate]) -> None:
        self._kept = [(candidate.position, candidate.quantity("activations")) for candidate in candidates]
        self._again: dict[str, list[tuple[int, Quantity]]] = defaultdict(list)
        for candidate in candidates:
            if candidate.block is not None:
                self._again[candidate.block].append(
                    (candidate.recomputed_until, candidate.quantity("recomputed_block"))
                )

    def of(self, kept: Sequence[_Kept], block: str | None) -> list[Quantity]:
        """Return the quantities of candidates at which a tensor is alive: recomputed in ``block``, or saved (None)."""
        since = min(k.since for k in kept)
        candidates = self._kept if block is None else self._again.get(block, ())
        return [name for position, name in candidates if position >= since]


def _while_read(kept: Sequence[_Kept], candidates: Sequence[PeakCandidate]) -> list[Quantity]:
    """Return the quantities of the candidates between the backward of the last op that reads a tensor and the first."""
    first, last = min(k.since for k in kept), max(k.since for k in kept)
    return [candidate.quantity("transient") for candidate in candidates if first <= candidate.position <= last]


def _is_held(kept: Sequence[_Kept], block: str | None) -> bool:
    """Tell whether a tensor is there at the end of the forward: kept from then on, and not made again."""
    return block is None and min(k.since for k in kept) < NEVER


def _self_saved(regions: RegionGraph, profile: GraphProfile, region: Region, position: int) -> bool:
    """Tell whether the region that makes a tensor keeps it itself."""
    value = region.slots[position].value
    root = profile.root[value.name]
    return any(root in profile.ops[region_op.op.name].saved for region_op in region.ops)


def _further(
    regions: RegionGraph,
    profile: GraphProfile,
    leaving: OutgoingLinks,
    timeline: Timeline,
    region_index: int,
    entry: int,
) -> Iterator[tuple[int, int, int]]:
    """Yield the links (edge, consumer, position) to regions that save a tensor which other regions only pass on."""
    region = regions.regions[region_index]
    for slot in range(len(region.slots)):
        if timeline.passed_through.get((region_index, slot)) != entry:
            continue
        for edge, consumer, position in leaving.get((region_index, slot), ()):
            if _self_saved(regions, profile, regions.regions[consumer], position):
                yield edge, consumer, position
            else:
                yield from _further(regions, profile, leaving, timeline, consumer, position)


def _kept_by_others(
    regions: RegionGraph,
    again_in: Mapping[int, str],
    leaving: OutgoingLinks,
    timeline: Timeline,
    region_index: int,
    entry: int,
) -> int:
    """Return the candidate from which others save what a checkpointed block passes on, as it is or redistributed."""
    home = again_in.get(region_index)
    since = NEVER
    for slot in range(len(regions.regions[region_index].slots)):
        if timeline.passed_through.get((region_index, slot)) != entry:
            continue
        for _, consumer, position in leaving.get((region_index, slot), ()):
            block = again_in.get(consumer)
            if block != home:
                there = timeline.savers[consumer, position] if block is None else timeline.starts[block]
                since = min(since, there)
    return since


def _passed_at(
    regions: RegionGraph,
    profile: GraphProfile,
    timeline: Timeline,
    region: Region,
    slot: int,
    links: Sequence[tuple[int, int, int]],
) -> list[PeakCandidate]:
    """Return the candidates at which a tensor's gradient has come, in shared memory, and is redistributed.

    Autograd runs backward in the order opposite to the forward's: what was redistributed just before its first reader
    when the backward of all readers is done, and what its producer's module redistributed just before its producer's.
    """
    name = region.slots[slot].value.name
    there = [candidate for candidate in timeline.candidates if name in timeline.aliased_gradients[candidate.key]]
    boundaries = (regions.regions[consumer].slots[position].boundary for _, consumer, position in links)
    if any(boundary is not None and boundary.direction == "input" for boundary in boundaries):
        first = min(timeline.first_reads[consumer, position] for _, consumer, position in links)
        return [candidate for candidate in there if candidate.position < first]
    ops = regions.graph.ops
    outputs = {candidate.position: ops[candidate.position].outputs for candidate in there if candidate.position >= 0}
    return [m for m in there if name in {profile.root[output] for output in outputs.get(m.position, ())}]


def _hook_inside(regions: RegionGraph, region: Region, position: int, block: str) -> bool:
    """Tell whether the boundary of an entry lies inside ``block`` (and not at the block's own boundary)."""
    boundary = region.slots[position].boundary
    assert boundary is not None
    return regions.graph.calls[boundary.call].fqn.startswith(block + ".")
