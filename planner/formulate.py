"""From regions, strategies and prices to the `Problem` that is solved, and the meaning of its choices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard

from cost_model import reserve_bytes
from cost_model.layout import Layout, divides, replicated
from planner import problem as quantity
from planner.blocks import Blocks
from planner.costs import Port, Price, Pricer, add_prices
from planner.graph import Crossing, Value
from planner.problem import Charge, Edge, Node, Problem, Unit
from planner.profile import GraphProfile
from planner.regions import Region, RegionGraph
from planner.strategies.enumerate import Strategy, StrategyTable

Accepts = Callable[[Region, Strategy], bool]
"""Whether a strategy may be chosen (baselines and random plans restrict the space)."""
AcceptsStored = Callable[[Value, Sequence[str], Layout], bool]
"""(parameter, its FQNs, stored layout) -> whether it may be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChoice:
    """How a parameter rests; ``accumulated``: how its gradient accumulates, where several uses must agree on one."""

    stored: Layout
    accumulated: Layout | None


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
class Layer:
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


def build_layer(regions: RegionGraph, profile: GraphProfile, blocks: Blocks, ac: str) -> Layer:
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
    return Layer(
        regions=regions,
        profile=profile,
        blocks=blocks,
        ac=ac,
        edges=tuple(edge_index),
        parameters=parameters,
        agreements=_agreements(regions, edge_index),
        first_class=min(with_parameters, key=lambda pair: order[pair[0]])[1] if with_parameters else None,
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


def _subset(edges: Iterator[int] | Sequence[int]) -> tuple[int, ...]:
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


@dataclass(slots=True)
class Formulation:
    """A `Problem` and what its nodes stand for: first one per region class, then one per parameter class."""

    layer: Layer
    pricer: Pricer
    problem: Problem
    strategies: tuple[tuple[Strategy, ...], ...]
    stored: tuple[tuple[StoredChoice, ...], ...]


class Formulator:
    """Builds the `Problem` of one run."""

    def __init__(self, layer: Layer, pricer: Pricer, table: StrategyTable, base: RegionGraph | None = None) -> None:
        self._layer = layer
        self._base = base or layer.regions
        self.pricer = pricer
        self._table = table
        self._mesh = pricer.run.mesh.shape
        self._pairs: dict[tuple[object, ...], Price | None] = {}

    def build(self, accepts: Accepts | None = None, accepts_stored: AcceptsStored | None = None) -> Formulation | None:
        """Return the problem with the strategies that ``accepts`` lets through; None where a region has none left."""
        strategies = []
        for index in range(len(self._layer.regions.classes)):
            region = self._layer.representative(index)
            found = [s for s in self.strategies(index) if accepts is None or accepts(region, s)]
            if not found:
                return None
            strategies.append(tuple(found))
        stored = [self._stored(parameter, strategies, accepts_stored) for parameter in self._layer.parameters]
        if not all(stored):
            return None
        return self.of(strategies, stored)

    def of(self, strategies: Sequence[tuple[Strategy, ...]], stored: Sequence[tuple[StoredChoice, ...]]) -> Formulation:
        """Return the problem in which each class has the given choices."""
        nodes = [self._region_node(index, choices) for index, choices in enumerate(strategies)]
        nodes += [self._parameter_node(p, choices) for p, choices in zip(self._layer.parameters, stored, strict=True)]
        ports = _Ports()
        edges = [self._edge(key, strategies, ports) for key in self._layer.edges]
        units = list(self._units(edges, ports))
        edges += [self._agreement(edges[a], edges[b]) for a, b in self._layer.agreements]
        edges += list(self._parameter_edges(strategies, stored, ports))
        problem = Problem(nodes=tuple(nodes), edges=tuple(edges), units=tuple(units), constant=self.constant())
        return Formulation(
            layer=self._layer, pricer=self.pricer, problem=problem, strategies=tuple(strategies), stored=tuple(stored)
        )

    def strategies(self, index: int) -> tuple[Strategy, ...]:
        """Return every strategy of a region class on the run's mesh."""
        region = self._layer.representative(index)
        return self._table.on_mesh(region, self._mesh, self._base.regions[region.index])

    # --- nodes ---------------------------------------------------------------------------------------------------

    def region_price(self, index: int, strategy: Strategy) -> Price:
        """Return the price of all regions of a class under ``strategy``."""
        layer = self._layer
        region = layer.representative(index)
        members = layer.regions.classes[index].members
        held: dict[str, int] = Counter(
            layer.blocks.of_region[m] for m in members if layer.blocks.of_region.get(m) in layer.blocks.representatives
        )
        return self.pricer.region(
            region, strategy, count=len(members), block=layer.block(region), in_representative=held
        )

    def _region_node(self, index: int, choices: Sequence[Strategy]) -> Node:
        charges = tuple(self.region_price(index, strategy).charge for strategy in choices)
        return Node(name=self._layer.regions.classes[index].pattern or "(root)", charges=charges)

    def _stored(
        self, parameter: ParameterClass, strategies: Sequence[tuple[Strategy, ...]], accepts: AcceptsStored | None
    ) -> tuple[StoredChoice, ...]:
        value = self.value_of(parameter)
        names = self._layer.regions.graph.parameters[parameter.values[0]]
        layouts = [
            layout for layout in stored_layouts(value, self._mesh) if accepts is None or accepts(value, names, layout)
        ]
        if len(parameter.uses) < 2 or not value.requires_grad or not self.pricer.run.job.training:
            return tuple(StoredChoice(stored=layout, accumulated=None) for layout in layouts)
        natural = {s.gradient[slot] for index, slot in parameter.uses for s in strategies[index]}
        choices = []
        for layout in layouts:
            for accumulated in dict.fromkeys([*sorted((g for g in natural if g is not None), key=str), layout]):
                choices.append(StoredChoice(stored=layout, accumulated=accumulated))
        return tuple(choices)

    def value_of(self, parameter: ParameterClass) -> Value:
        """Return one of the equal parameters of a class."""
        return self._layer.regions.graph.values[parameter.values[0]]

    def parameter_price(self, parameter: ParameterClass, choice: StoredChoice) -> Price | None:
        """Return the price of keeping the parameters of a class so; None where their gradient cannot be reduced so."""
        value = self.value_of(parameter)
        price = self.pricer.parameter(value, choice.stored, len(parameter.values))
        if choice.accumulated is None:
            return price
        reduced = self.pricer.accumulated_gradient(value, choice.accumulated, choice.stored, len(parameter.values))
        return None if reduced is None else add_prices((price, reduced))

    def _parameter_node(self, parameter: ParameterClass, choices: Sequence[StoredChoice]) -> Node:
        prices = [self.parameter_price(parameter, choice) for choice in choices]
        assert all(price is not None for price in prices)
        names = self._layer.regions.graph.parameters[parameter.values[0]]
        return Node(name=names[0], charges=tuple(price.charge for price in prices if price is not None))

    def constant(self) -> Charge:
        """Return what a step costs whatever is chosen."""
        layer = self._layer
        saved = {name for profile in layer.profile.ops.values() for name in profile.saved}
        values = layer.regions.graph.values
        plain = sum(values[name].nbytes for name in saved if values[name].kind == "plain")
        device = self.pricer.run.cluster.device
        return {
            quantity.MEMORY + "reserve": float(reserve_bytes(device)),
            quantity.MEMORY + "activations": float(plain if self.pricer.run.job.training else 0),
        }

    # --- edges ---------------------------------------------------------------------------------------------------

    def redistribution_price(self, value: Value, source: Port, target: Port) -> Price | None:
        """Return the price of one redistribution, forward and backward; None where it cannot be."""
        key = (value.shape, value.dtype, value.requires_grad, source, target)
        if key not in self._pairs:
            self._pairs[key] = Price() if source == target else self.pricer.redistribution(value, source, target, 1)
        return self._pairs[key]

    def _edge(self, key: EdgeKey, strategies: Sequence[tuple[Strategy, ...]], ports: _Ports) -> Edge:
        producer = [(s.forward[key.producer_slot], s.gradient[key.producer_slot]) for s in strategies[key.producer]]
        consumer = [(s.forward[key.consumer_slot], s.gradient[key.consumer_slot]) for s in strategies[key.consumer]]
        value = self._layer.representative(key.consumer).slots[key.consumer_slot].value
        pairs: dict[tuple[int, int], Charge] = {}
        for p in dict.fromkeys(producer):
            for q in dict.fromkeys(consumer):
                if self.redistribution_price(value, p, q) is not None:
                    pairs[ports.index(p), ports.index(q)] = {}
        return Edge(
            producer=key.producer,
            consumer=key.consumer,
            producer_ports=tuple(ports.index(p) for p in producer),
            consumer_ports=tuple(ports.index(q) for q in consumer),
            pairs=pairs,
        )

    @staticmethod
    def _agreement(a: Edge, b: Edge) -> Edge:
        """Return an edge that holds the producers of two edges to the same port: one key of the plan names both."""
        shared = set(a.producer_ports) & set(b.producer_ports)
        return Edge(
            producer=a.producer,
            consumer=b.producer,
            producer_ports=a.producer_ports,
            consumer_ports=b.producer_ports,
            pairs={(p, p): {} for p in shared},
        )

    def _units(self, edges: Sequence[Edge], ports: _Ports) -> Iterator[Unit]:
        for tally in self._layer.forward:
            for p, q, members in _meeting(edges, tally.edges):
                price = self.redistribution_price(self._value(tally), ports.port(p), ports.port(q))
                if p != q and price is not None and price.charge:
                    yield Unit(charge=_times(price.charge, tally.count), members=members)
        for tally in self._layer.recompute:
            for p, q, members in _meeting(edges, tally.edges):
                if ports.port(p)[0] != ports.port(q)[0]:
                    price = self.pricer.recomputed_redistribution(
                        self._value(tally), ports.port(p), ports.port(q), tally.count
                    )
                    if price.charge:
                        yield Unit(charge=price.charge, members=members)
        if self.pricer.run.job.training:
            yield from self._memory_units(edges, ports)

    def _memory_units(self, edges: Sequence[Edge], ports: _Ports) -> Iterator[Unit]:
        for tally in self._layer.kept:
            by_layout: dict[Layout, list[tuple[int, int, int]]] = defaultdict(list)
            for p, q, members in _meeting(edges, tally.edges):
                source, target = ports.port(p)[0], ports.port(q)[0]
                if source is not None and (tally.always or source == target):
                    by_layout[source] += members
            for layout, found in by_layout.items():
                charge = self.pricer.copy(self._value(tally), layout, tally.count, tally.quantity).charge
                yield Unit(charge=charge, members=tuple(found))
        for tally in self._layer.copied:
            for p, q, members in _meeting(edges, tally.edges):
                target = ports.port(q)[0]
                if target is not None and ports.port(p)[0] != target:
                    charge = self.pricer.copy(self._value(tally), target, tally.count, tally.quantity).charge
                    yield Unit(charge=charge, members=members)

    def _value(self, tally: Tally) -> Value:
        key = self._layer.edges[tally.edges[0]]
        return self._layer.representative(key.consumer).slots[key.consumer_slot].value

    # --- parameters ----------------------------------------------------------------------------------------------

    def use_price(
        self, parameter: ParameterClass, use: tuple[int, int], choice: StoredChoice, port: Port
    ) -> Price | None:
        """Return the price of one use of a parameter class (gathers, reduction), None where it cannot be."""
        index, slot = use
        layer = self._layer
        region = layer.representative(index)
        value = region.slots[slot].value
        block = layer.block(region)
        saved = any(layer.profile.root[value.name] in layer.profile.ops[o.op.name].saved for o in region.ops)
        return self.pricer.parameter_use(
            value,
            choice.stored,
            choice.accumulated,
            port,
            count=len(parameter.values) * parameter.uses[use],
            saved=saved,
            recomputed=block is not None,
            first=index == layer.first_class,
        )

    def _parameter_edges(
        self, strategies: Sequence[tuple[Strategy, ...]], stored: Sequence[tuple[StoredChoice, ...]], ports: _Ports
    ) -> Iterator[Edge]:
        for position, (parameter, choices) in enumerate(zip(self._layer.parameters, stored, strict=True)):
            for use in parameter.uses:
                index, slot = use
                shown = [(s.forward[slot], s.gradient[slot]) for s in strategies[index]]
                pairs: dict[tuple[int, int], Charge] = {}
                for c, choice in enumerate(choices):
                    for q in dict.fromkeys(shown):
                        price = self.use_price(parameter, use, choice, q)
                        if price is not None:
                            pairs[c, ports.index(q)] = price.charge
                yield Edge(
                    producer=len(strategies) + position,
                    consumer=index,
                    producer_ports=tuple(range(len(choices))),
                    consumer_ports=tuple(ports.index(q) for q in shown),
                    pairs=pairs,
                )


class _Ports:
    """Numbers for ports."""

    def __init__(self) -> None:
        self._numbers: dict[Port, int] = {}
        self._ports: list[Port] = []

    def index(self, port: Port) -> int:
        if port not in self._numbers:
            self._numbers[port] = len(self._ports)
            self._ports.append(port)
        return self._numbers[port]

    def port(self, index: int) -> Port:
        return self._ports[index]


def _meeting(
    edges: Sequence[Edge], chosen: Sequence[int]
) -> Iterator[tuple[int, int, tuple[tuple[int, int, int], ...]]]:
    """Yield each pair of ports that can meet on any of the ``chosen`` edges, with the edges on which it can."""
    members: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for edge in chosen:
        for p, q in edges[edge].pairs:
            members[p, q].append((edge, p, q))
    for (p, q), found in members.items():
        yield p, q, tuple(found)


def _times(charge: Charge, count: float) -> Charge:
    return {name: amount * count for name, amount in charge.items()}


def stored_layouts(value: Value, mesh_shape: Sequence[int]) -> list[Layout]:
    """Return every layout that a parameter can rest in: replicated or evenly split, per axis."""
    found: list[Layout] = [()]
    for size in mesh_shape:
        options = [Replicate(), *(Shard(dim) for dim in range(len(value.shape)))] if size > 1 else [Replicate()]
        found = [(*layout, option) for layout in found for option in options]
    return [layout for layout in found if divides(value.shape, layout, mesh_shape)] or [replicated(len(mesh_shape))]
