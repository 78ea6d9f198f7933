"""The estimator: seconds and bytes of a step under a decision, summed item by item.

The items are the prices of every region, parameter, redistribution and saved tensor. The integer program is not used;
its objective has to be the same figure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.layouts.layout import MeshSpec
from planner.formulation.decision import Decision
from planner.formulation.formulate import Formulator
from planner.formulation.host_time import host_s
from planner.formulation.model_flops import model_flops
from planner.formulation.saved_tensors import saves_producer_layout
from planner.graph.op_graph import Value
from planner.ilp.quantities import BACKWARD, EXPOSED, FORWARD, Kind
from planner.ilp.step_cost import Totals, exposed_once_s, live_bytes, peak_bytes, phase_time_s, step_time_s
from planner.liveness.multiplicity import Multiplicity
from planner.liveness.parameter_classes import FsdpGroup
from planner.liveness.structure import EdgeKey, Structure
from planner.plan.estimate import ONCE_A_STEP, CollectiveEstimate, Estimate, Phase
from planner.pricing.port_layouts import PortLayouts, consumer_port, producer_port
from planner.pricing.price import Price, add_prices
from planner.pricing.run_spec import Run


class Item(NamedTuple):
    """One item of a decision's price, and where it occurs.

    Attributes:
        region: the region class that runs it, of a redistribution the one that reads the tensor; None: no class does.
        edge: of a redistribution, the edge of the tensor that is redistributed.
        group: of collectives of FSDP groups, a kind of block.
        ports: of a redistribution, the layouts before and after it.
    """

    price: Price
    region: int | None = None
    edge: EdgeKey | None = None
    group: FsdpGroup | None = None
    ports: tuple[PortLayouts, PortLayouts] | None = None


class _Itemiser:
    def __init__(self, formulator: Formulator, structure: Structure, decision: Decision) -> None:
        self._formulator = formulator
        self._pricer = formulator.pricer
        self._structure = structure
        self._decision = decision

    def items(self) -> Iterator[Item]:
        yield Item(Price(charge=self._formulator.constant()))
        for index, strategy in enumerate(self._decision.strategies):
            yield Item(self._formulator.region_price(index, strategy), index)
        for parameter, choice in zip(self._structure.parameters, self._decision.stored, strict=True):
            first = next((index for index, _ in parameter.uses), None)
            yield Item(_some(self._formulator.parameter_price(parameter, choice)), first)
            for use in parameter.uses:
                index, slot = use
                strategy = self._decision.strategies[index]
                price = self._formulator.use_price(parameter, use, choice, producer_port(strategy, slot))
                yield Item(_some(price), index)
        for gather in self._formulator.fsdp_variables.chosen(self._decision.stored, self._decision.reshard_after):
            yield Item(self._formulator.fsdp_variables.price(gather), group=gather.block)
        yield from self._redistributions()
        if self._pricer.run.job.has_peak_candidates:
            yield from map(Item, self._copies())

    def _ports(self, key: EdgeKey) -> tuple[PortLayouts, PortLayouts]:
        producer, consumer = self._decision.strategies[key.producer], self._decision.strategies[key.consumer]
        return producer_port(producer, key.producer_slot), consumer_port(consumer, key.consumer_slot)

    def _value(self, multiplicity: Multiplicity) -> Value:
        key = self._structure.edges[multiplicity.edges[0]]
        return self._structure.representative(key.consumer).slots[key.consumer_slot].value

    def _wanted(self, multiplicity: Multiplicity) -> list[tuple[PortLayouts, PortLayouts]]:
        """Return the distinct pairs (producer's layouts, consumer's layouts) on the edges of ``multiplicity``."""
        return list(dict.fromkeys(self._ports(self._structure.edges[edge]) for edge in multiplicity.edges))

    def _redistributions(self) -> Iterator[Item]:
        for multiplicity in self._structure.redistributions:
            value, adjacent = self._value(multiplicity), self._formulator.adjacent_gemms(multiplicity)
            for source, target in self._wanted(multiplicity):
                if source != target:
                    price = _some(self._pricer.redistribution(value, source, target, multiplicity.count, adjacent))
                    yield self._redistribution_item(price, multiplicity, source, target)
        for multiplicity in self._structure.recomputed_redistributions:
            value, adjacent = self._value(multiplicity), self._formulator.recomputed_adjacent_gemms(multiplicity)
            for source, target in self._wanted(multiplicity):
                if source.layout != target.layout:
                    count = multiplicity.count
                    price = self._pricer.recomputed_redistribution(value, source, target, count, adjacent)
                    yield self._redistribution_item(price, multiplicity, source, target)

    def _redistribution_item(
        self, price: Price, multiplicity: Multiplicity, source: PortLayouts, target: PortLayouts
    ) -> Item:
        keys = (self._structure.edges[edge] for edge in multiplicity.edges)
        edge = next(key for key in keys if self._ports(key) == (source, target))
        return Item(price, edge.consumer, edge, ports=(source, target))

    def _copies(self) -> Iterator[Price]:
        throughout = self._structure.timeline.throughout
        for multiplicity in self._structure.saved_tensors:
            layouts = (
                p.layout
                for p, q in self._wanted(multiplicity)
                if multiplicity.in_producer_layout or saves_producer_layout(p, q)
            )
            for layout in dict.fromkeys(layout for layout in layouts if layout is not None):
                yield self._pricer.live_bytes(self._value(multiplicity), layout, multiplicity, throughout)
        for multiplicity in self._structure.saved_copies:
            for source, target in self._wanted(multiplicity):
                if source.layout != target.layout and target.layout is not None:
                    value = self._value(multiplicity)
                    yield self._pricer.live_bytes(
                        value, target.layout, multiplicity, throughout, reallgather=target.reallgather
                    )
        for multiplicity in self._structure.shared_gradients:
            gradient = self._wanted(multiplicity)[0][0].gradient
            if gradient is not None and any(target.gradient != gradient for _, target in self._wanted(multiplicity)):
                yield self._pricer.live_bytes(self._value(multiplicity), gradient, multiplicity, throughout)


def _some(price: Price | None) -> Price:
    assert price is not None, "a decision that was checked cannot ask for an impossible redistribution"
    return price


def itemise(formulator: Formulator, structure: Structure, decision: Decision) -> Price:
    """Return the price of ``decision``: the totals of all quantities, and every collective."""
    return add_prices([item.price for item in items(formulator, structure, decision)])


def items(formulator: Formulator, structure: Structure, decision: Decision) -> Iterator[Item]:
    """Yield the items that the price of ``decision`` is the sum of."""
    return _Itemiser(formulator, structure, decision).items()


def estimate(formulator: Formulator, structure: Structure, decision: Decision) -> Estimate:
    """Return seconds and bytes of one step under ``decision``."""
    price = itemise(formulator, structure, decision)
    total = price.charge
    forward = phase_time_s(total, FORWARD) + exposed_once_s(total, FORWARD)
    backward, late = phase_time_s(total, BACKWARD), exposed_once_s(total, BACKWARD)
    compute = total.get(FORWARD.compute, 0.0) + total.get(BACKWARD.compute, 0.0)
    step = step_time_s(total)
    optimizer = optimizer_s(formulator, structure, decision)
    collectives = collective_rows(price, formulator.pricer.run)
    return Estimate(
        step_time_s=step,
        forward_s=forward,
        backward_s=backward,
        grad_reduce_s=max(total.get(EXPOSED, 0.0) - optimizer, 0.0) + late,
        optimizer_s=optimizer,
        compute_s=compute,
        communication_s=sum(row.time_s for row in collectives),
        exposed_communication_s=max(step - compute - optimizer, 0.0),
        model_flops=model_flops(structure, formulator.pricer.run),
        host_s=host_s(structure, formulator.pricer.run, collectives),
        peak_memory_bytes=round(peak_bytes(total)),
        memory=memory_roles(total),
        collectives=collectives,
    )


def optimizer_s(formulator: Formulator, structure: Structure, decision: Decision) -> float:
    """Return the seconds of the optimizer's update."""
    values = structure.regions.graph.values
    seconds = 0.0
    for parameter, choice in zip(structure.parameters, decision.stored, strict=True):
        price = formulator.parameter_pricer.state(values[parameter.values[0]], choice.stored, len(parameter.values))
        seconds += price.charge.get(EXPOSED, 0.0)
    return seconds


def collective_rows(price: Price, run: Run) -> tuple[CollectiveEstimate, ...]:
    """Return the collectives of a price, with equal ones merged, and with calls and seconds of a step of ``run``.

    The price counts a pipeline's idle time as further micro-batches (`Run.passes`). These are not counted here.
    """
    counts: dict[tuple[CollectiveKind, str, Phase, int], float] = defaultdict(float)
    times: dict[tuple[CollectiveKind, str, Phase, int], float] = defaultdict(float)
    for c in price.collectives:
        key = (c.kind, c.axis, c.phase, c.nbytes)
        calls = c.count if c.phase in ONCE_A_STEP else run.micro_batches * c.count / run.passes
        counts[key] += calls
        times[key] += calls * c.time_s
    order = sorted(counts, key=lambda key: (_PHASES.index(key[2]), _places(key[1], run.mesh), key[0], -key[3]))
    return tuple(
        CollectiveEstimate(kind=kind, axis=axis, phase=phase, bytes=nbytes, count=round(counts[key]), time_s=times[key])
        for key in order
        for kind, axis, phase, nbytes in [key]
    )


def _places(axes: str, mesh: MeshSpec) -> list[int]:
    """Return the places in ``mesh`` of the axes that ``axes`` names; -1 for the axis of pipeline stages."""
    return [mesh.names.index(axis) if axis in mesh.names else -1 for axis in axes.split(",")]


_PHASES = ("param_gather", "forward", "recompute", "backward", "grad_reduce")


LIVE_ROLES = ("activations", "gradients", "recomputed_block", "transient")


def memory_roles(total: Totals) -> dict[str, int]:
    """Return role -> bytes at the peak; the bytes add up to the peak."""
    roles = {q.role: round(amount) for q, amount in total.items() if q.kind is Kind.PERSISTENT and q.role is not None}
    roles |= dict.fromkeys(LIVE_ROLES, 0) | roles
    working = (amount for q, amount in total.items() if q.kind is Kind.TRANSIENT)
    roles["transient"] = round(max(working, default=0.0))
    at_peak: Mapping[str, float] = max(live_bytes(total).values(), key=lambda alive: sum(alive.values()), default={})
    for role, nbytes in at_peak.items():
        roles[role] += round(nbytes)
    roles["transient"] += round(peak_bytes(total)) - sum(roles.values())
    return roles
