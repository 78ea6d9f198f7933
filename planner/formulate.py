"""From regions, strategies and prices to the `Problem` that is solved, and the meaning of its choices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard

from cost_model import reserve_bytes
from cost_model.layout import Layout, divides, replicated, split_factor
from planner import problem as quantity
from planner.costs import Port, Price, Pricer, add_prices
from planner.graph import Value
from planner.problem import Charge, Edge, Node, Problem, Unit
from planner.regions import Region, RegionGraph
from planner.strategies.enumerate import Strategy, StrategyTable
from planner.structure import EdgeKey, ParameterClass, Structure, Tally

Accepts = Callable[[Region, Strategy], bool]
"""Whether a strategy may be chosen (baselines and random plans restrict the space)."""
AcceptsStored = Callable[[Value, Sequence[str], Layout], bool]
"""(parameter, its FQNs, stored layout) -> whether it may be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChoice:
    """How a parameter rests; ``accumulated``: the layout that its gradient is brought to in every backward.

    Where that is None, the gradient accumulates in the layout that its one use gives it, and is reduced once a step.
    """

    stored: Layout
    accumulated: Layout | None


@dataclass(slots=True)
class Formulation:
    """A `Problem` and what its nodes stand for: first one per region class, then one per parameter class."""

    structure: Structure
    pricer: Pricer
    problem: Problem
    strategies: tuple[tuple[Strategy, ...], ...]
    stored: tuple[tuple[StoredChoice, ...], ...]


class Formulator:
    """Builds the `Problem` of one run."""

    def __init__(
        self, structure: Structure, pricer: Pricer, table: StrategyTable, base: RegionGraph | None = None
    ) -> None:
        self._structure = structure
        self._base = base or structure.regions
        self.pricer = pricer
        self._table = table
        self._mesh = pricer.run.mesh.shape
        self._pairs: dict[tuple[object, ...], Price | None] = {}

    def build(self, accepts: Accepts | None = None, accepts_stored: AcceptsStored | None = None) -> Formulation | None:
        """Return the problem with the strategies that ``accepts`` lets through; None where a region has none left."""
        strategies = []
        for index in range(len(self._structure.regions.classes)):
            region = self._structure.representative(index)
            found = [s for s in self.strategies(index) if accepts is None or accepts(region, s)]
            if not found:
                return None
            strategies.append(tuple(found))
        stored = [self._stored(parameter, strategies, accepts_stored) for parameter in self._structure.parameters]
        if not all(stored):
            return None
        return self.of(strategies, stored)

    def of(self, strategies: Sequence[tuple[Strategy, ...]], stored: Sequence[tuple[StoredChoice, ...]]) -> Formulation:
        """Return the problem in which each class has the given choices."""
        nodes = [self._region_node(index, choices) for index, choices in enumerate(strategies)]
        nodes += [
            self._parameter_node(p, choices) for p, choices in zip(self._structure.parameters, stored, strict=True)
        ]
        ports = _Ports()
        edges = [self._edge(key, strategies, ports) for key in self._structure.edges]
        units = list(self._units(edges, ports))
        edges += [self._agreement(edges[a], edges[b]) for a, b in self._structure.agreements]
        edges += list(self._parameter_edges(strategies, stored, ports))
        problem = Problem(nodes=tuple(nodes), edges=tuple(edges), units=tuple(units), constant=self.constant())
        return Formulation(
            structure=self._structure,
            pricer=self.pricer,
            problem=problem,
            strategies=tuple(strategies),
            stored=tuple(stored),
        )

    def strategies(self, index: int) -> tuple[Strategy, ...]:
        """Return every strategy of a region class on the run's mesh."""
        region = self._structure.representative(index)
        return self._table.on_mesh(region, self._mesh, self._base.regions[region.index])

    # --- nodes ---------------------------------------------------------------------------------------------------

    def region_price(self, index: int, strategy: Strategy) -> Price:
        """Return the price of all regions of a class under ``strategy``."""
        structure = self._structure
        region = structure.representative(index)
        members = structure.regions.classes[index].members
        held: dict[str, int] = Counter(
            structure.blocks.of_region[m]
            for m in members
            if structure.blocks.of_region.get(m) in structure.blocks.representatives
        )
        return self.pricer.region(
            region, strategy, count=len(members), block=structure.block(region), in_representative=held
        )

    def _region_node(self, index: int, choices: Sequence[Strategy]) -> Node:
        charges = tuple(self.region_price(index, strategy).charge for strategy in choices)
        return Node(name=self._structure.regions.classes[index].pattern or "(root)", charges=charges)

    def _stored(
        self, parameter: ParameterClass, strategies: Sequence[tuple[Strategy, ...]], accepts: AcceptsStored | None
    ) -> tuple[StoredChoice, ...]:
        value = self.value_of(parameter)
        names = self._structure.regions.graph.parameters[parameter.values[0]]
        layouts = [
            layout for layout in stored_layouts(value, self._mesh) if accepts is None or accepts(value, names, layout)
        ]
        if len(parameter.uses) < 2 or not value.requires_grad or not self.pricer.run.job.training:
            once = [StoredChoice(stored=layout, accumulated=None) for layout in layouts]
            return (*once, *self._reduced_every_time(value, layouts))
        natural = {s.gradient[slot] for index, slot in parameter.uses for s in strategies[index]}
        choices = []
        for layout in layouts:
            for accumulated in dict.fromkeys([*sorted((g for g in natural if g is not None), key=str), layout]):
                choices.append(StoredChoice(stored=layout, accumulated=accumulated))
        return tuple(choices)

    def _reduced_every_time(self, value: Value, layouts: Sequence[Layout]) -> list[StoredChoice]:
        """Return the choices that reduce a gradient in every micro-batch, so that it never accumulates unsplit."""
        run = self.pricer.run
        if run.micro_batches == 1 or not run.job.training or not value.requires_grad:
            return []
        split = [layout for layout in layouts if split_factor(layout, self._mesh) > 1]
        return [StoredChoice(stored=layout, accumulated=layout) for layout in split]

    def value_of(self, parameter: ParameterClass) -> Value:
        """Return one of the equal parameters of a class."""
        return self._structure.regions.graph.values[parameter.values[0]]

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
        names = self._structure.regions.graph.parameters[parameter.values[0]]
        return Node(name=names[0], charges=tuple(price.charge for price in prices if price is not None))

    def constant(self) -> Charge:
        """Return what a step costs whatever is chosen."""
        structure = self._structure
        saved = {name for profile in structure.profile.ops.values() for name in profile.saved}
        values = structure.regions.graph.values
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
        value = self._structure.representative(key.consumer).slots[key.consumer_slot].value
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
        for tally in self._structure.forward:
            for p, q, members in _meeting(edges, tally.edges):
                price = self.redistribution_price(self._value(tally), ports.port(p), ports.port(q))
                if p != q and price is not None and price.charge:
                    yield Unit(charge=_times(price.charge, tally.count), members=members)
        for tally in self._structure.recompute:
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
        for tally in self._structure.kept:
            by_layout: dict[Layout, list[tuple[int, int, int]]] = defaultdict(list)
            for p, q, members in _meeting(edges, tally.edges):
                source, target = ports.port(p)[0], ports.port(q)[0]
                if source is not None and (tally.always or source == target):
                    by_layout[source] += members
            for layout, found in by_layout.items():
                charge = self.pricer.copy(self._value(tally), layout, tally.count, tally.quantity).charge
                yield Unit(charge=charge, members=tuple(found))
        for tally in self._structure.copied:
            for p, q, members in _meeting(edges, tally.edges):
                target = ports.port(q)[0]
                if target is not None and ports.port(p)[0] != target:
                    charge = self.pricer.copy(self._value(tally), target, tally.count, tally.quantity).charge
                    yield Unit(charge=charge, members=members)

    def _value(self, tally: Tally) -> Value:
        key = self._structure.edges[tally.edges[0]]
        return self._structure.representative(key.consumer).slots[key.consumer_slot].value

    # --- parameters ----------------------------------------------------------------------------------------------

    def use_price(
        self, parameter: ParameterClass, use: tuple[int, int], choice: StoredChoice, port: Port
    ) -> Price | None:
        """Return the price of one use of a parameter class (gathers, reduction), None where it cannot be."""
        index, slot = use
        structure = self._structure
        region = structure.representative(index)
        value = region.slots[slot].value
        block = structure.block(region)
        saved = any(structure.profile.root[value.name] in structure.profile.ops[o.op.name].saved for o in region.ops)
        return self.pricer.parameter_use(
            value,
            choice.stored,
            choice.accumulated,
            port,
            count=len(parameter.values) * parameter.uses[use],
            saved=saved,
            recomputed=block is not None,
            first=index == structure.first_class,
        )

    def _parameter_edges(
        self, strategies: Sequence[tuple[Strategy, ...]], stored: Sequence[tuple[StoredChoice, ...]], ports: _Ports
    ) -> Iterator[Edge]:
        for position, (parameter, choices) in enumerate(zip(self._structure.parameters, stored, strict=True)):
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
