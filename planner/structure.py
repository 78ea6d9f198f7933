"""What of a planning problem no mesh changes: what is decided together, and how often each redistribution occurs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.blocks import Blocks
from planner.graph import Crossing
from planner.profile import GraphProfile
from planner.regions import Region, RegionGraph
from planner.timeline import NEVER, Moment, Timeline, build_timeline

_Leaving = Mapping[tuple[int, int], list[tuple[int, int, int]]]
"""(region, slot) -> where it goes: edge, region and entry there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterClass:
    """Equal parameters of equal blocks: they share their stored layout.

    Attributes:
        values: the parameters.
        uses: (region class, slot) -> number of uses by each of the parameters.
        gradients: moment's quantity -> how many of the parameters have their gradients by then.
        working: use -> moment's quantity -> how many of them an op uses at that moment.
        pending: use -> moment's quantity -> how many have a gradient from that use, the last of several, which
            waits for those of the others.
        unreduced: moment's quantity -> how many have their gradients by then, but not their block all of its own.
    """

    values: tuple[str, ...]
    uses: Mapping[tuple[int, int], int]
    gradients: Mapping[str, int]
    working: Mapping[tuple[int, int], Mapping[str, int]]
    pending: Mapping[tuple[int, int], Mapping[str, int]]
    unreduced: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeKey:
    """A link between region classes: from a slot of one to a slot of the other."""

    producer: int
    producer_slot: int
    consumer: int
    consumer_slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How often something is paid, for one set of edges that leave the same tensor.

    Attributes:
        count: of redistributions.
        alive: of saved tensors: moment's quantity -> how many there are at it.
        always: whether a saved tensor is kept as its producer makes it, whatever the consumers want.
    """

    edges: tuple[int, ...]
    count: int = 0
    alive: Mapping[str, int] = field(default_factory=dict)
    always: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGather:
    """A kind of block whose parameters can be gathered together: one flat collective for each of ``count`` blocks.

    Attributes:
        kind: FQN of the kind's representative.
        held: index of a parameter class -> how many of its parameters one such block holds.
        numel: elements of all of them.
        is_first: whether it is the first such kind in the model.
        moments: quantity of a moment inside such blocks -> how many blocks' parameters are whole by then (its own, and
            that of the block before it) and how many buffers gradients are being reduced in (that of the block after
            it).
    """

    kind: str
    count: int
    held: Mapping[int, int]
    numel: int
    is_first: bool
    moments: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What does not depend on the mesh: classes, edges, and how often each redistribution and saved copy occurs.

    Attributes:
        arguments: region class -> slots that show what the model is called with, each tensor once.
    """

    regions: RegionGraph
    profile: GraphProfile
    blocks: Blocks
    ac: str
    edges: tuple[EdgeKey, ...]
    parameters: tuple[ParameterClass, ...]
    forward: tuple[Tally, ...]
    recompute: tuple[Tally, ...]
    kept: tuple[Tally, ...]
    copied: tuple[Tally, ...]
    passed: tuple[Tally, ...]
    agreements: tuple[tuple[int, int], ...]
    first_class: int | None
    arguments: Mapping[int, tuple[int, ...]]
    gathers: tuple[BlockGather, ...]
    timeline: Timeline

    def representative(self, region_class: int) -> Region:
        """Return a region of the class."""
        return self.regions.regions[self.regions.classes[region_class].members[0]]

    def block(self, region: Region) -> str | None:
        """Return the checkpointed block that ``region`` is in, None where it is in none."""
        return None if self.ac == "none" else self.blocks.of_region.get(region.index)


def _self_saved(regions: RegionGraph, profile: GraphProfile, region: Region, position: int) -> bool:
    """Tell whether the region that makes a tensor keeps it itself."""
    value = region.slots[position].value
    root = profile.root[value.name]
    return any(root in profile.ops[region_op.op.name].saved for region_op in region.ops)


def _block_of(blocks: Blocks, ac: str, region: int) -> str | None:
    """Return the checkpointed block that a region is in."""
    return blocks.of_region.get(region) if ac != "none" else None


def _further(
    regions: RegionGraph,
    profile: GraphProfile,
    leaving: _Leaving,
    timeline: Timeline,
    region_index: int,
    entry: int,
) -> Iterator[tuple[int, int, int]]:
    """Yield the links (edge, consumer, position) to regions that keep a tensor which other regions only hand on."""
    region = regions.regions[region_index]
    for slot in range(len(region.slots)):
        if timeline.handed_on.get((region_index, slot)) != entry:
            continue
        for edge, consumer, position in leaving.get((region_index, slot), ()):
            if _self_saved(regions, profile, regions.regions[consumer], position):
                yield edge, consumer, position
            else:
                yield from _further(regions, profile, leaving, timeline, consumer, position)


def _passed_at(
    regions: RegionGraph,
    profile: GraphProfile,
    timeline: Timeline,
    region: Region,
    slot: int,
    links: Sequence[tuple[int, int, int]],
) -> list[Moment]:
    """Return the moments at which a tensor's gradient has come, in memory shared with another's, and is redistributed.

    Autograd runs backward in the order opposite to the forward's: what was redistributed just before its first reader
    when the backward of all readers is done, and what its producer's module redistributed just before its producer's.
    """
    name = region.slots[slot].value.name
    there = [moment for moment in timeline.moments if name in timeline.passed[moment.key]]
    boundaries = (regions.regions[consumer].slots[position].boundary for _, consumer, position in links)
    if any(boundary is not None and boundary.direction == "input" for boundary in boundaries):
        return [moment for moment in there if moment.position < timeline.first_reads.get(name, NEVER)]
    ops = regions.graph.ops
    outputs = {moment.position: ops[moment.position].outputs for moment in there if moment.position >= 0}
    return [m for m in there if name in {profile.root[output] for output in outputs.get(m.position, ())}]


def _hook_inside(regions: RegionGraph, region: Region, position: int, block: str) -> bool:
    """Tell whether the boundary of an entry lies inside ``block`` (and not at the block's own boundary)."""
    boundary = region.slots[position].boundary
    assert boundary is not None
    return regions.graph.calls[boundary.call].fqn.startswith(block + ".")


def build_structure(regions: RegionGraph, profile: GraphProfile, blocks: Blocks, ac: str) -> Structure:
    """Return everything about the problem that no mesh changes."""
    edge_index: dict[EdgeKey, int] = {}
    leaving: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for link in regions.links:
        key = EdgeKey(
            producer=regions.class_of[link.producer],
            producer_slot=link.producer_slot,
            consumer=regions.class_of[link.consumer],
            consumer_slot=link.consumer_slot,
        )
        edge = edge_index.setdefault(key, len(edge_index))
        leaving[link.producer, link.producer_slot].append((edge, link.consumer, link.consumer_slot))
    timeline = build_timeline(regions, profile, blocks, ac)
    tallies = _count(regions, profile, blocks, ac, leaving, timeline)
    parameters = _parameter_classes(regions, timeline)
    with_parameters = [
        (region.ops[0].op.name, regions.class_of[region.index])
        for region in regions.regions
        if region.ops and any(slot.origin == "parameter" for slot in region.slots)
    ]
    order = {op.name: position for position, op in enumerate(regions.graph.ops)}
    return Structure(
        regions=regions,
        profile=profile,
        blocks=blocks,
        ac=ac,
        edges=tuple(edge_index),
        parameters=parameters,
        agreements=_agreements(regions, edge_index),
        first_class=min(with_parameters, key=lambda pair: order[pair[0]])[1] if with_parameters else None,
        arguments=_arguments(regions),
        gathers=_block_gathers(regions, blocks, parameters, timeline),
        timeline=timeline,
        **tallies,
    )


def _arguments(regions: RegionGraph) -> dict[int, tuple[int, ...]]:
    found: dict[str, tuple[int, int]] = {}
    for region in regions.regions:
        for position, slot in enumerate(region.slots):
            if slot.value.kind == "input" and slot.source is None:
                found.setdefault(slot.value.name, (regions.class_of[region.index], position))
    slots: dict[int, list[int]] = defaultdict(list)
    for region_class, position in found.values():
        slots[region_class].append(position)
    return {region_class: tuple(positions) for region_class, positions in slots.items()}


def _count(
    regions: RegionGraph,
    profile: GraphProfile,
    blocks: Blocks,
    ac: str,
    leaving: _Leaving,
    timeline: Timeline,
) -> dict[str, tuple[Tally, ...]]:
    saves = timeline.savers
    forward: Counter[tuple[int, ...]] = Counter()
    recompute: Counter[tuple[int, ...]] = Counter()
    kept: dict[tuple[tuple[int, ...], bool], Counter[str]] = defaultdict(Counter)
    copied: dict[tuple[int, ...], Counter[str]] = defaultdict(Counter)
    passed: dict[tuple[int, ...], Counter[str]] = defaultdict(Counter)
    for (producer, slot), links in leaving.items():
        region = regions.regions[producer]
        home = _block_of(blocks, ac, producer)
        own = _self_saved(regions, profile, region, slot)
        together: dict[str | None, list[int]] = defaultdict(list)
        again: dict[str, list[int]] = defaultdict(list)
        keepers: dict[tuple[str | None, bool], list[_Kept]] = defaultdict(list)
        copiers: dict[str | None, list[_Kept]] = defaultdict(list)
        for edge, consumer, position in links:
            block = _block_of(blocks, ac, consumer)
            inside = block is not None and _hook_inside(regions, regions.regions[consumer], position, block)
            together[block if inside else None].append(edge)
            if block is not None and inside:
                again[block].append(edge)
            since = saves[consumer, position]
            within = _Kept(edge, since)
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
                apart = further and all(_block_of(blocks, ac, c) == block for _, c, _ in further)
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
        owns = is_made and (producer, slot) not in timeline.handed_on
        there = [m.quantity("transient") for m in _passed_at(regions, profile, timeline, region, slot, links)]
        if is_made and there:
            passed[_subset(edge for edge, _, _ in links)].update(there)
        for (where, always), found in keepers.items():
            if owns and not (own and (where is None) == (home is None)):
                kept[_subset(k.edge for k in found), always].update(_alive(found, where, timeline.moments))
        for where, found in copiers.items():
            copied[_subset(k.edge for k in found)].update(_alive(found, where, timeline.moments))
    return {
        "forward": tuple(Tally(edges=edges, count=n) for edges, n in forward.items()),
        "recompute": tuple(Tally(edges=edges, count=n) for edges, n in recompute.items()),
        "kept": tuple(Tally(edges=edges, always=always, alive=alive) for (edges, always), alive in kept.items()),
        "copied": tuple(Tally(edges=edges, alive=alive) for edges, alive in copied.items()),
        "passed": tuple(Tally(edges=edges, alive=alive) for edges, alive in passed.items()),
    }


def _subset(edges: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(edges)))


class _Kept(NamedTuple):
    """A tensor kept for the consumer at the end of an edge, from the moment ``since`` back to the start."""

    edge: int
    since: int


def _alive(kept: Sequence[_Kept], block: str | None, moments: Sequence[Moment]) -> dict[str, int]:
    """Return the moments' quantities at which a tensor is there: made again in ``block``, or kept all along (None)."""
    since = min(k.since for k in kept)
    role = "activations" if block is None else "recomputed_block"
    there = [m for m in moments if m.position >= since and (block is None or m.block == block)]
    return {moment.quantity(role): 1 for moment in there}


def _parameter_classes(regions: RegionGraph, timeline: Timeline) -> tuple[ParameterClass, ...]:
    uses: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for region in regions.regions:
        for position, slot in enumerate(region.slots):
            if slot.origin == "parameter":
                uses[slot.value.name][regions.class_of[region.index], position] += 1
    groups: dict[tuple[tuple[tuple[int, int], int], ...], list[str]] = defaultdict(list)
    for value, counted in uses.items():
        groups[tuple(sorted(counted.items()))].append(value)
    return tuple(
        ParameterClass(
            values=tuple(values),
            uses=dict(key),
            gradients=_gradients(values, timeline),
            working={use: _working(use[0], values, regions, timeline) for use, _ in key},
            pending={use: _pending(use[0], values, regions, timeline) for use, _ in key},
            unreduced=_unreduced(values, timeline),
        )
        for key, values in groups.items()
    )


def _gradients(values: Sequence[str], timeline: Timeline) -> dict[str, int]:
    """Return moment's quantity -> how many of the parameters are used by later ops only."""
    counts = {
        moment.quantity("gradients"): sum(
            min(timeline.uses[value], default=NEVER) > moment.position for value in values
        )
        for moment in timeline.moments
    }
    return {name: count for name, count in counts.items() if count}


def _pending(region_class: int, values: Sequence[str], regions: RegionGraph, timeline: Timeline) -> dict[str, int]:
    """Return moment's quantity -> how many of the parameters wait with the gradient of their last use, in a class.

    Autograd adds the gradients of all uses up before it hands them to the parameter.
    """
    members = regions.classes[region_class].members
    inside = {region_op.op.name for member in members for region_op in regions.regions[member].ops}
    found: Counter[str] = Counter()
    for value in values:
        uses = timeline.uses[value]
        if len(uses) > 1 and regions.graph.ops[max(uses)].name in inside:
            waiting = (m for m in timeline.moments if min(uses) <= m.position < max(uses))
            found.update(moment.quantity("gradients") for moment in waiting)
    return dict(found)


def _unreduced(values: Sequence[str], timeline: Timeline) -> dict[str, int]:
    """Return moment's quantity -> how many of the parameters are used later in the block that the moment is in."""
    found: dict[str, int] = {}
    for block, moments in timeline.blocks.items():
        for moment in moments:
            later = [
                v for v in values if moment.position < min(timeline.uses[v], default=NEVER) <= timeline.ends[block]
            ]
            if later:
                found[moment.quantity("gradients")] = len(later)
    return found


def _working(region_class: int, values: Sequence[str], regions: RegionGraph, timeline: Timeline) -> dict[str, int]:
    """Return moment's quantity -> how many of the parameters an op of a class of regions uses at it."""
    found = {}
    for moment in timeline.moments:
        op = regions.graph.ops[moment.position].name
        members = (regions.regions[member] for member in regions.classes[region_class].members)
        if any(region_op.op.name == op for region in members for region_op in region.ops):
            found[moment.quantity("transient")] = sum(moment.position in timeline.uses[value] for value in values)
    return {name: count for name, count in found.items() if count}


def _block_gathers(
    regions: RegionGraph, blocks: Blocks, parameters: Sequence[ParameterClass], timeline: Timeline
) -> tuple[BlockGather, ...]:
    """Return the kinds of blocks with parameters that are trained and used once, inside their block."""
    home: dict[str, str] = {}
    contents: dict[str, list[int]] = defaultdict(list)
    for region in regions.regions:
        block = blocks.of_region.get(region.index)
        if block is None:
            continue
        contents[block].append(regions.class_of[region.index])
        for slot in region.slots:
            if slot.origin == "parameter" and slot.parameter is not None and slot.parameter.startswith(block + "."):
                home[slot.value.name] = block
    held: dict[str, Counter[int]] = defaultdict(Counter)
    for index, parameter in enumerate(parameters):
        values = [regions.graph.values[name] for name in parameter.values]
        used_once = len(parameter.uses) == 1 and set(parameter.uses.values()) == {1}
        if used_once and all(value.requires_grad and value.name in home for value in values):
            for value in values:
                held[home[value.name]][index] += 1
    kinds: Counter[tuple[int, ...]] = Counter(tuple(sorted(contents[block])) for block in held)
    found: list[BlockGather] = []
    for block in blocks.representatives:
        if block in held:
            numel = sum(
                n * (v := regions.graph.values[parameters[index].values[0]]).nbytes // v.dtype.itemsize
                for index, n in held[block].items()
            )
            count = kinds[tuple(sorted(contents[block]))]
            alike = [b for b in held if sorted(contents[b]) == sorted(contents[block])]
            ends = [min(timeline.starts[b] for b in held), max(timeline.starts[b] for b in held)]
            inside = {
                moment.quantity("transient"): (1 + (timeline.starts[b] > ends[0]), int(timeline.starts[b] < ends[1]))
                for b in alike
                for moment in timeline.blocks.get(b, ())
            }
            found.append(
                BlockGather(
                    kind=block,
                    count=count,
                    held=dict(held[block]),
                    numel=numel,
                    is_first=not found,
                    moments=inside,
                )
            )
    return tuple(found)


def hook_key(regions: RegionGraph, crossing: Crossing) -> tuple[str, str, str]:
    """Return (module FQN, input or output, argument path): what a plan's key can tell apart."""
    return regions.graph.calls[crossing.call].fqn, crossing.direction, crossing.path


def _agreements(regions: RegionGraph, edge_index: Mapping[EdgeKey, int]) -> tuple[tuple[int, int], ...]:
    """Return pairs of edges that one key of the plan names, so that they must show the same ports."""
    by_key: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for link in regions.links:
        slot = regions.regions[link.consumer].slots[link.consumer_slot]
        assert slot.boundary is not None
        key = EdgeKey(
            producer=regions.class_of[link.producer],
            producer_slot=link.producer_slot,
            consumer=regions.class_of[link.consumer],
            consumer_slot=link.consumer_slot,
        )
        by_key[hook_key(regions, slot.boundary)].add(edge_index[key])
    pairs = {pair for edges in by_key.values() for pair in zip(sorted(edges), sorted(edges)[1:], strict=False)}
    return tuple(sorted(pairs))
