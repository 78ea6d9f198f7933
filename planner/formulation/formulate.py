"""`Formulator`: the `Problem` of a run, from regions, strategies and prices; and the meaning of its choices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cost_model import reserve_by_role
from cost_model.layouts.layout import Layout
from cost_model.layouts.uneven import Rounded
from planner.formulation.choice_filters import Accepts, AcceptsStored, ChoiceFilter
from planner.formulation.fsdp_variables import FsdpVariables
from planner.formulation.parameter_copies import is_saved, same_layout_edges
from planner.formulation.saved_tensors import charge_saved_tensors, consumed_value
from planner.graph.op_graph import Value
from planner.ilp.problem import Edge, Node, Problem, same_consumer_port, same_producer_port
from planner.ilp.quantities import PASSES, Charge, persistent
from planner.ilp.shared_charges import SharedChargeCollector, pairs_on
from planner.liveness.multiplicity import Multiplicity
from planner.liveness.parameter_classes import ParameterClass
from planner.liveness.structure import EdgeKey, Structure
from planner.pricing.activation_costs import ActivationPricer
from planner.pricing.async_tp import AdjacentGemmFinder
from planner.pricing.fsdp_group_costs import FsdpGroupPricer
from planner.pricing.overlap import AdjacentGemms
from planner.pricing.parameter_costs import ParameterClassUse, ParameterPricer
from planner.pricing.parameter_use_costs import ParameterUsePrices
from planner.pricing.port_layouts import PortLayouts, consumer_port, producer_port
from planner.pricing.price import Price
from planner.pricing.reallgather_variants import with_reallgather_variants
from planner.pricing.storage_options import StorageOption, fsdp_use_layouts, storage_options, stored_layouts
from planner.regions.regions import RegionGraph
from planner.strategies.context_parallel_order import allows_zigzag, zigzag_edges, zigzag_length
from planner.strategies.enumerate import Strategy, StrategyTable
from planner.strategies.sliced_parameters import slices_parameters


@dataclass(slots=True)
class Formulation:
    """A `Problem`, and the strategies and storage options that its choices stand for.

    Its nodes: one per region class, then one per parameter class, then those of `planner.formulation.fsdp_variables`.
    """

    structure: Structure
    pricer: ActivationPricer
    problem: Problem
    strategies: tuple[tuple[Strategy, ...], ...]
    stored: tuple[tuple[StorageOption, ...], ...]
    fsdp_variables: FsdpVariables


class Formulator:
    """Builds the `Problem` of one run."""

    def __init__(
        self, structure: Structure, pricer: ActivationPricer, table: StrategyTable, base: RegionGraph | None = None
    ) -> None:
        self._structure = structure
        self._base = base or structure.regions
        self.pricer = pricer
        self._table = table
        self._mesh = pricer.run.mesh.shape
        self._ports = pricer.redistribution_pricer.ports
        graph = structure.regions.graph
        self.parameter_pricer = ParameterPricer(pricer.run, pricer.redistribution_pricer, graph.parameters)
        overlapped = pricer.run.job.async_tp and pricer.run.cluster.device.overlaps
        self._products = AdjacentGemmFinder(structure, pricer.run) if overlapped else None
        self.fsdp_variables = FsdpVariables(
            structure, FsdpGroupPricer(pricer.run, pricer.redistribution_pricer), self._mesh
        )
        self._zigzag_length = zigzag_length(graph)

    def build(
        self,
        accepts: Accepts | None = None,
        accepts_stored: AcceptsStored | None = None,
        choice_filter: ChoiceFilter | None = None,
    ) -> Formulation | None:
        """Return the problem with the choices that all filters allow; None where a class has no choice left."""
        strategies = []
        for index in range(len(self._structure.regions.classes)):
            region = self._structure.representative(index)
            class_strategies = [
                s
                for s in self.strategies(index)
                if (choice_filter is None or choice_filter.strategy(index, s))
                and (accepts is None or accepts(region, s))
            ]
            if not class_strategies:
                return None
            strategies.append(tuple(class_strategies))
        stored = [
            tuple(
                choice
                for choice in self.storage_choices(parameter, strategies, accepts_stored)
                if choice_filter is None or choice_filter.stored(index, choice)
            )
            for index, parameter in enumerate(self._structure.parameters)
        ]
        if not all(stored):
            return None
        return self.with_choices(strategies, stored)

    def with_choices(
        self, strategies: Sequence[tuple[Strategy, ...]], stored: Sequence[tuple[StorageOption, ...]]
    ) -> Formulation:
        """Return the problem in which each class has the given choices."""
        nodes = [self._region_node(index, choices) for index, choices in enumerate(strategies)]
        nodes += [
            self._parameter_node(p, choices) for p, choices in zip(self._structure.parameters, stored, strict=True)
        ]
        axes_node = len(nodes)
        nodes += self.fsdp_variables.nodes()
        edges = [self._edge(key, strategies) for key in self._structure.edges]
        charges = SharedChargeCollector()
        self._charge_redistributions(edges, charges)
        agree = self._ports.agree
        agreed = [same_producer_port(edges[a], edges[b], agree) for a, b in self._structure.same_producer_ports]
        edges += [
            *agreed,
            *(same_consumer_port(edges[a], edges[b], agree) for a, b in self._structure.same_consumer_ports),
        ]
        edges += list(self._parameter_edges(strategies, stored))
        edges += same_layout_edges(self._structure.parameters, self._ports, strategies)
        edges += self.fsdp_variables.edges(len(strategies), stored, axes_node, len(edges), charges)
        if self._zigzag_length is not None:
            regions = [self._structure.representative(index) for index in range(len(strategies))]
            edges += zigzag_edges(regions, strategies, self._mesh)
        shared_charges = charges.settle(edges)
        problem = Problem(
            nodes=tuple(nodes), edges=tuple(edges), shared_charges=shared_charges, constant=self.constant()
        )
        return Formulation(
            structure=self._structure,
            pricer=self.pricer,
            problem=problem,
            strategies=tuple(strategies),
            stored=tuple(stored),
            fsdp_variables=self.fsdp_variables,
        )

    def strategies(self, index: int) -> tuple[Strategy, ...]:
        """Return every strategy of a region class on the run's mesh.

        In inference, strategies that slice a replicated parameter are left out: DTensor copies the slice in every step.
        """
        region = self._structure.representative(index)
        strategies = self._table.on_mesh(
            region, self._mesh, self._base.regions[region.index], self.pricer.run.batch_axes
        )
        job = self.pricer.run.job
        if self._zigzag_length is not None:
            strategies = tuple(s for s in strategies if allows_zigzag(region, s, self._zigzag_length, self._mesh))
        if job.phase != "training":
            return tuple(s for s in strategies if not slices_parameters(region, s))
        # It only saves memory: no gain without peak candidates.
        if job.reallgather and self._structure.timeline.candidates:
            return with_reallgather_variants(self._structure, region, strategies)
        return strategies

    # --- nodes ---------------------------------------------------------------------------------------------------

    def region_price(self, index: int, strategy: Strategy) -> Price:
        """Return the price of all regions of a class under ``strategy``."""
        structure = self._structure
        region = structure.representative(index)
        members = structure.regions.classes[index].members
        return self.pricer.regions.price(
            region,
            strategy,
            count=len(members),
            checkpointing=structure.mode(region),
            timeline=structure.timeline.classes[index] if structure.timeline.candidates else None,
            throughout=structure.timeline.throughout,
            boundary_slots=structure.boundary_slots.get(index, ()),
            autograd_sums=structure.autograd_sums[index],
            gemm_sums=structure.gemm_sums[index],
        )

    def _region_node(self, index: int, choices: Sequence[Strategy]) -> Node:
        charges = tuple(self.region_price(index, strategy).charge for strategy in choices)
        return Node(name=self._structure.regions.classes[index].pattern or "(root)", charges=charges)

    def storage_choices(
        self, parameter: ParameterClass, strategies: Sequence[tuple[Strategy, ...]], accepts: AcceptsStored | None
    ) -> tuple[StorageOption, ...]:
        """Return the storage options of a parameter class, given the strategies of each region class."""
        value, names = self.value_of(parameter), self._structure.regions.graph.parameters[parameter.values[0]]
        used = {s.forward[slot] for index, slot in parameter.uses for s in strategies[index]}
        layouts = [
            layout
            for layout in stored_layouts(
                value, self._mesh, sorted((u for u in used if u is not None), key=str), self.rounded
            )
            if accepts is None or accepts(value, names, layout)
        ]
        ports = {(s.forward[slot], s.gradient[slot]) for index, slot in parameter.uses for s in strategies[index]}
        natural = [gradient for _, gradient in ports if gradient is not None]
        choices = storage_options(value, layouts, self.pricer.run, natural, parameter.is_used_again)
        # A parameter in an FSDP group has one layout in use. The option goes if no strategy has that layout.
        return tuple(c for c in choices if c.fsdp_axes is None or fsdp_use_layouts(c) in ports)

    @property
    def rounded(self) -> Rounded:
        """Lengths of dims that are rounded up (`OpGraph.rounded`)."""
        return self._structure.regions.graph.rounded

    def value_of(self, parameter: ParameterClass) -> Value:
        """Return one of the equal parameters of a class."""
        return self._structure.regions.graph.values[parameter.values[0]]

    def parameter_price(self, parameter: ParameterClass, choice: StorageOption) -> Price | None:
        """Return the price of storing a class's parameters as ``choice``; None: gradients cannot be reduced to it."""
        value, count = self.value_of(parameter), len(parameter.values)
        return self.parameter_pricer.storage(value, choice, count, parameter.gradients)

    def _parameter_node(self, parameter: ParameterClass, choices: Sequence[StorageOption]) -> Node:
        prices = [self.parameter_price(parameter, choice) for choice in choices]
        assert all(price is not None for price in prices)
        names = self._structure.regions.graph.parameters[parameter.values[0]]
        return Node(name=names[0], charges=tuple(price.charge for price in prices if price is not None))

    def constant(self) -> Charge:
        """Return the charge of every assignment: passes, reserved bytes, saved plain tensors, unread parameters."""
        structure, run = self._structure, self.pricer.run
        saved = {structure.regions.graph.values[name] for op in structure.profile.ops.values() for name in op.saved}
        plain = sum(value.nbytes for value in saved if value.kind == "plain")
        return {
            PASSES: float(run.passes),
            **{persistent(role): float(nbytes) for role, nbytes in reserve_by_role(run.cluster.device).items()},
            persistent("activations"): float(plain * run.in_flight if run.job.training else 0),
            persistent("parameters"): self.parameter_pricer.unread_nbytes(structure),
            **self.parameter_pricer.optimizer.workspace(map(self.value_of, structure.parameters)),
        }

    # --- edges ---------------------------------------------------------------------------------------------------

    def adjacent_gemms(self, multiplicity: Multiplicity) -> AdjacentGemms | None:
        """Return the GEMMs that overlap with redistributions in async tensor parallelism; None: there is no overlap."""
        return None if self._products is None else self._products.redistribution(multiplicity)

    def recomputed_adjacent_gemms(self, multiplicity: Multiplicity) -> AdjacentGemms | None:
        """Return the same for the redistributions that checkpointed blocks recompute."""
        return None if self._products is None else self._products.recomputed(multiplicity)

    def redistribution_price(self, value: Value, source: PortLayouts, target: PortLayouts) -> Price | None:
        """Return the price of one redistribution, forward and backward; None where it is impossible."""
        return self.pricer.redistribution(value, source, target, 1)

    def _edge(self, key: EdgeKey, strategies: Sequence[tuple[Strategy, ...]]) -> Edge:
        number = self._ports.number
        producer = [number(producer_port(s, key.producer_slot)) for s in strategies[key.producer]]
        consumer = [number(consumer_port(s, key.consumer_slot)) for s in strategies[key.consumer]]
        exchanged = self.pricer.redistributed_tensor(
            self._structure.representative(key.consumer).slots[key.consumer_slot].value
        )
        price = self.pricer.redistribution_pricer.both_ways
        consumer_ports = list(dict.fromkeys(consumer))
        pairs: dict[tuple[int, int], Charge] = {
            (p, q): {} for p in dict.fromkeys(producer) for q in consumer_ports if price(exchanged, p, q) is not None
        }
        return Edge(
            producer=key.producer,
            consumer=key.consumer,
            producer_ports=tuple(producer),
            consumer_ports=tuple(consumer),
            pairs=pairs,
        )

    def _charge_redistributions(self, edges: Sequence[Edge], charges: SharedChargeCollector) -> None:
        ports, pricer = self._ports, self.pricer
        for multiplicity in self._structure.redistributions:
            value = consumed_value(self._structure, multiplicity)
            exchanged = pricer.redistributed_tensor(value, self.adjacent_gemms(multiplicity))
            for p, q, members in pairs_on(edges, multiplicity.edges):
                price = pricer.redistribution_pricer.both_ways(exchanged, p, q)
                if price is not None:
                    charges.add(members, price.charge, multiplicity.count)
        for multiplicity in self._structure.recomputed_redistributions:
            value = consumed_value(self._structure, multiplicity)
            adjacent = self.recomputed_adjacent_gemms(multiplicity)
            for p, q, members in pairs_on(edges, multiplicity.edges):
                if ports.port(p).layout != ports.port(q).layout:
                    price = pricer.recomputed_redistribution(
                        value, ports.port(p), ports.port(q), multiplicity.count, adjacent
                    )
                    charges.add(members, price.charge)
        if pricer.run.job.has_peak_candidates:
            charge_saved_tensors(self._structure, pricer, edges, charges)

    # --- parameters ----------------------------------------------------------------------------------------------

    def use_price(
        self, parameter: ParameterClass, use: tuple[int, int], choice: StorageOption, port: PortLayouts
    ) -> Price | None:
        """Return the price of one use of a parameter class (all-gather, reduction); None where it is impossible."""
        class_use = self._use(parameter, use)
        if choice.fsdp_axes is None:
            return self.parameter_pricer.use(class_use, choice, port)
        if fsdp_use_layouts(choice) != (port.layout, port.gradient):
            return None
        return self._block_price(parameter, class_use, choice, port)

    def _block_price(
        self, parameter: ParameterClass, use: ParameterClassUse, choice: StorageOption, port: PortLayouts
    ) -> Price | None:
        """Return the price of one use of parameters in FSDP groups, in the layouts ``port``; None: they are in none."""
        gradient_nbytes = self.parameter_pricer.gradient_nbytes(use.value, choice.stored)
        return self.fsdp_variables.use_price(parameter, port, gradient_nbytes)

    def _use(self, parameter: ParameterClass, use: tuple[int, int]) -> ParameterClassUse:
        (index, slot), structure = use, self._structure
        region = structure.representative(index)
        value = region.slots[slot].value
        return ParameterClassUse(
            value=value,
            count=len(parameter.values) * parameter.uses[use],
            saved=is_saved(structure, parameter.sharing(use)),
            recomputed=structure.mode(region) is not None,
            last_in_backward=index == structure.first_region_class,
            working=parameter.working[use],
            pending=parameter.pending[use],
            gradients=parameter.gradients,
        )

    def _parameter_edges(
        self, strategies: Sequence[tuple[Strategy, ...]], stored: Sequence[tuple[StorageOption, ...]]
    ) -> Iterator[Edge]:
        """Yield the edges between parameters and their uses."""
        for position, (parameter, choices) in enumerate(zip(self._structure.parameters, stored, strict=True)):
            for use in parameter.uses:
                index, slot = use
                shown = [self._ports.number(producer_port(s, slot)) for s in strategies[index]]
                yield Edge(
                    producer=len(strategies) + position,
                    consumer=index,
                    producer_ports=tuple(range(len(choices))),
                    consumer_ports=tuple(shown),
                    pairs=self._use_charges(parameter, self._use(parameter, use), choices, tuple(dict.fromkeys(shown))),
                )

    def _use_charges(
        self,
        parameter: ParameterClass,
        use: ParameterClassUse,
        choices: Sequence[StorageOption],
        port_numbers: Sequence[int],
    ) -> dict[tuple[int, int], Charge]:
        """Return (index of storage option, port) -> charge of one use; impossible pairs are left out."""
        ports = [self._ports.port(q) for q in port_numbers]
        by_layouts: dict[tuple[Layout | None, Layout | None], list[int]] = defaultdict(list)
        for q, port in zip(port_numbers, ports, strict=True):
            by_layouts[port.layout, port.gradient].append(q)
        alone = ParameterUsePrices(self.parameter_pricer, use, ports)
        pairs: dict[tuple[int, int], Charge] = {}
        for c, choice in enumerate(choices):
            if choice.fsdp_axes is None:
                port_charges = zip(port_numbers, alone.charges(choice), strict=True)
                pairs.update(((c, q), charge) for q, charge in port_charges if charge is not None)
                continue
            layouts = fsdp_use_layouts(choice)
            for q in () if layouts is None else by_layouts.get(layouts, ()):
                price = self._block_price(parameter, use, choice, self._ports.port(q))
                if price is not None:
                    pairs[c, q] = price.charge
        return pairs
