"""What of a planning problem no mesh changes: what is decided together, and how often each redistribution occurs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner import problem as quantity
from planner.blocks import Blocks
from planner.graph import Crossing
from planner.profile import GraphProfile
from planner.regions import Region, RegionGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterClass:
    """Equal parameters of equal blocks: they share their stored layout.

    Attributes:
        values: the parameters.
        uses: (region class, slot) -> number of uses by each of the parameters.
    """

    values: tuple[str, ...]
    uses: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeKey:
    """A link between region classes: from a slot of one to a slot of the other."""

    producer: int
    producer_slot: int
    consumer: int
    consumer_slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How often something is paid, for one set of edges that leave the same tensor."""

    edges: tuple[int, ...]
    count: int
    quantity: str = ""
    always: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGather:
    """A kind of block whose parameters can be gathered together: one flat collective for each of ``count`` blocks.

    Attributes:
        kind: FQN of the kind's representative.
        held: index of a parameter class -> how many of its parameters one such block holds.
        numel: elements of all of them.
        is_first: whether it is the first such kind in the model.
    """

    kind: str
    count: int
    held: Mapping[int, int]
    numel: int
    is_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What does not depend on the mesh: classes, edges, and how often each redistribution and saved copy occurs."""

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
    agreements: tuple[tuple[int, int], ...]
    first_class: int | None
    gathers: tuple[BlockGather, ...]

    def representative(self, region_class: int) -> Region:
        """Return a region of the class."""
        return self.regions.regions[self.regions.classes[region_class].members[0]]

    def block(self, region: Region) -> str | None:
        """Return the checkpointed block that ``region`` is in, None where it is in none."""
        return None if self.ac == "none" else self.blocks.of_region.get(region.index)


def region_saves(regions: RegionGraph, profile: GraphProfile) -> dict[tuple[int, int], bool]:
    """Tell for every entry (region, slot) whether its tensor is kept for the backward: there, or further down."""
    saves: dict[tuple[int, int], bool] = {}
    for region in regions.regions:
        saved = {name for region_op in region.ops for name in profile.ops[region_op.op.name].saved}
        for position, slot in enumerate(region.slots):
            if slot.origin == "entry":
                saves[region.index, position] = profile.root.get(slot.value.name, slot.value.name) in saved
    changed = True
    while changed:
        changed = False
        for link in regions.links:
            source = (link.producer, link.producer_slot)
            if source in saves and not saves[source] and saves[link.consumer, link.consumer_slot]:
                saves[source] = changed = True
    return saves


def _self_saved(regions: RegionGraph, profile: GraphProfile, region: Region, position: int) -> bool:
    """Tell whether the region that makes a tensor keeps it itself."""
    value = region.slots[position].value
    root = profile.root[value.name]
    return any(root in profile.ops[region_op.op.name].saved for region_op in region.ops)


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
    tallies = _count(regions, profile, blocks, ac, leaving)
    parameters = _parameter_classes(regions)
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
        gathers=_block_gathers(regions, blocks, parameters),
        **tallies,
    )


def _count(
    regions: RegionGraph,
    profile: GraphProfile,
    blocks: Blocks,
    ac: str,
    leaving: Mapping[tuple[int, int], list[tuple[int, int, int]]],
) -> dict[str, tuple[Tally, ...]]:
    saves = region_saves(regions, profile)
    forward: Counter[tuple[int, ...]] = Counter()
    recompute: Counter[tuple[int, ...]] = Counter()
    kept: Counter[tuple[tuple[int, ...], str, bool]] = Counter()
    copied: Counter[tuple[tuple[int, ...], str]] = Counter()
    for (producer, slot), links in leaving.items():
        region = regions.regions[producer]
        home = blocks.of_region.get(producer) if ac != "none" else None
        together: dict[str | None, list[int]] = defaultdict(list)
        again: dict[str, list[int]] = defaultdict(list)
        keepers: dict[tuple[str, bool], list[int]] = defaultdict(list)
        copiers: dict[str, list[int]] = defaultdict(list)
        for edge, consumer, position in links:
            block = blocks.of_region.get(consumer) if ac != "none" else None
            inside = block is not None and _hook_inside(regions, regions.regions[consumer], position, block)
            together[block if inside else None].append(edge)
            if block is not None and inside:
                again[block].append(edge)
            saved = saves[consumer, position]
            enters = block is not None and block != home
            where = f"{quantity.RECOMPUTED}{block}" if block is not None else quantity.MEMORY + "activations"
            if enters and not inside:
                copiers[quantity.MEMORY + "activations"].append(edge)
                keepers[quantity.MEMORY + "activations", False].append(edge)
            elif enters:
                keepers[quantity.MEMORY + "activations", True].append(edge)
                if saved:
                    copiers[where].append(edge)
            elif saved:
                copiers[where].append(edge)
                keepers[where, False].append(edge)
        # A checkpointed block shares nothing with others: its recomputation has to stand alone.
        for edges in together.values():
            forward[_subset(edges)] += 1
        for edges in again.values():
            recompute[_subset(edges)] += 1
        owns = region.slots[slot].origin == "op"
        for (where, always), edges in keepers.items():
            own_save = _self_saved(regions, profile, region, slot) and (where.startswith(quantity.MEMORY)) == (
                home is None
            )
            if owns and not own_save and _counts(where, blocks):
                kept[_subset(edges), where, always] += 1
        for where, edges in copiers.items():
            if _counts(where, blocks):
                copied[_subset(edges), where] += 1
    return {
        "forward": tuple(Tally(edges=edges, count=n) for edges, n in forward.items()),
        "recompute": tuple(Tally(edges=edges, count=n) for edges, n in recompute.items()),
        "kept": tuple(
            Tally(edges=edges, quantity=where, always=always, count=n) for (edges, where, always), n in kept.items()
        ),
        "copied": tuple(Tally(edges=edges, quantity=where, count=n) for (edges, where), n in copied.items()),
    }


def _subset(edges: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(edges)))


def _counts(where: str, blocks: Blocks) -> bool:
    """Tell whether a quantity is one that is counted: recomputed parts only of one block of each kind."""
    return not where.startswith(quantity.RECOMPUTED) or where[len(quantity.RECOMPUTED) :] in blocks.representatives


def _parameter_classes(regions: RegionGraph) -> tuple[ParameterClass, ...]:
    uses: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for region in regions.regions:
        for position, slot in enumerate(region.slots):
            if slot.origin == "parameter":
                uses[slot.value.name][regions.class_of[region.index], position] += 1
    groups: dict[tuple[tuple[tuple[int, int], int], ...], list[str]] = defaultdict(list)
    for value, counted in uses.items():
        groups[tuple(sorted(counted.items()))].append(value)
    return tuple(ParameterClass(values=tuple(values), uses=dict(key)) for key, values in groups.items())


def _block_gathers(
    regions: RegionGraph, blocks: Blocks, parameters: Sequence[ParameterClass]
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
            found.append(BlockGather(kind=block, count=count, held=dict(held[block]), numel=numel, is_first=not found))
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
