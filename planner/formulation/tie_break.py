"""Tie-breaking: of decisions that cost the same, the one that a person would write (batch sharded, dims in order)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from cost_model.layouts.layout import Layout
from planner.formulation.choice_filters import Accepts, AcceptsStored
from planner.formulation.decision import Decision
from planner.formulation.estimate import itemise
from planner.formulation.formulate import Formulator
from planner.ilp.quantities import Charge
from planner.ilp.step_cost import step_time_s
from planner.liveness.parameter_classes import ParameterClass
from planner.liveness.structure import Structure
from planner.pricing.port_layouts import PortLayouts, consumer_port, producer_port
from planner.pricing.price import add_prices
from planner.pricing.storage_options import StorageOption, stored_layouts
from planner.regions.regions import Region
from planner.strategies.enumerate import Strategy

RELATIVE_TOLERANCE = 1e-12
"""Relative difference up to which two sums count as equal: the order of their terms can differ."""


def break_ties(
    formulator: Formulator,
    structure: Structure,
    decision: Decision,
    accepts: Accepts | None = None,
    accepts_stored: AcceptsStored | None = None,
) -> Decision:
    """Return a decision of the same price as ``decision``, with ties broken.

    Args:
        accepts: the strategies to choose from; None: all.
        accepts_stored: the stored layouts to choose from; None: all.
    """
    stored = [
        _tidier(formulator, parameter, choice, decision, _accepted(structure, parameter, accepts_stored))
        for parameter, choice in zip(structure.parameters, decision.stored, strict=True)
    ]
    strategies = [
        _input_strategy(formulator, structure, index, decision, accepts)
        if _is_input(structure.representative(index))
        else strategy
        for index, strategy in enumerate(decision.strategies)
    ]
    tie_broken = Decision(strategies=tuple(strategies), stored=tuple(stored), reshard_after=decision.reshard_after)
    return _without_idle_copies(formulator, structure, tie_broken)


def _without_idle_copies(formulator: Formulator, structure: Structure, decision: Decision) -> Decision:
    """Return the decision in which FSDP groups reshard as early as possible without a longer step."""
    if not decision.reshard_after:
        return decision
    time_s = step_time_s(itemise(formulator, structure, decision).charge)
    for kind in sorted(decision.reshard_after):
        for earlier in formulator.fsdp_variables.earlier_reshards(decision.reshard_after[kind]):
            other = dataclasses.replace(decision, reshard_after={**decision.reshard_after, kind: earlier})
            if step_time_s(itemise(formulator, structure, other).charge) <= time_s * (1.0 + RELATIVE_TOLERANCE):
                decision = other
                break
    return decision


def _accepted(
    structure: Structure, parameter: ParameterClass, accepts_stored: AcceptsStored | None
) -> Callable[[Layout], bool]:
    """Return a function: layout -> whether the parameters of a class may be stored in it."""
    graph = structure.regions.graph
    value, names = graph.values[parameter.values[0]], graph.parameters[parameter.values[0]]
    return lambda layout: accepts_stored is None or accepts_stored(value, names, layout)


def _tidier(
    formulator: Formulator,
    parameter: ParameterClass,
    choice: StorageOption,
    decision: Decision,
    is_accepted: Callable[[Layout], bool],
) -> StorageOption:
    """Return the storage option that costs the same as ``choice`` and whose stored layout is first in order of dims."""
    choice_charge = _parameter_charge(formulator, parameter, choice, decision)
    value = formulator.value_of(parameter)
    for layout in sorted(
        stored_layouts(value, formulator.pricer.run.mesh.shape, (), formulator.rounded),
        key=lambda layout: [str(p) for p in layout],
    ):
        accumulated = layout if choice.accumulated == choice.stored else choice.accumulated
        other = StorageOption(stored=layout, accumulated=accumulated, fsdp_axes=choice.fsdp_axes)
        if other == choice:
            return choice
        if not is_accepted(layout):
            continue
        charge = _parameter_charge(formulator, parameter, other, decision)
        if charge is not None and choice_charge is not None and _same(charge, choice_charge):
            return other
    return choice


def _parameter_charge(
    formulator: Formulator, parameter: ParameterClass, choice: StorageOption, decision: Decision
) -> Charge | None:
    prices = [formulator.parameter_price(parameter, choice)]
    for use in parameter.uses:
        index, slot = use
        strategy = decision.strategies[index]
        prices.append(formulator.use_price(parameter, use, choice, producer_port(strategy, slot)))
    possible_prices = [price for price in prices if price is not None]
    return add_prices(possible_prices).charge if len(possible_prices) == len(prices) else None


def _same(a: Charge, b: Charge) -> bool:
    return all(abs(a.get(n, 0.0) - b.get(n, 0.0)) <= RELATIVE_TOLERANCE * abs(b.get(n, 0.0)) for n in {*a, *b})


def _is_input(region: Region) -> bool:
    """Return whether a region only passes the model's inputs on to other regions."""
    return not region.ops and all(slot.origin == "entry" and slot.source is None for slot in region.slots)


def _input_strategy(
    formulator: Formulator, structure: Structure, index: int, decision: Decision, accepts: Accepts | None
) -> Strategy:
    """Return the strategy of an input region with the fewest replicated placements that needs no collective.

    Of several, the first in order of dims is returned. If the current strategy needs a collective, it is returned.
    """
    consumer_ports: list[tuple[int, PortLayouts]] = []
    for edge in structure.edges:
        if edge.producer == index:
            consumer = decision.strategies[edge.consumer]
            consumer_ports.append((edge.producer_slot, consumer_port(consumer, edge.consumer_slot)))
    region = structure.representative(index)

    def is_free(strategy: Strategy) -> bool:
        for slot, port in consumer_ports:
            price = formulator.redistribution_price(region.slots[slot].value, producer_port(strategy, slot), port)
            if price is None or price.collectives:
                return False
        return True

    current = decision.strategies[index]
    if not is_free(current):
        return current
    strategies = (s for s in formulator.strategies(index) if accepts is None or accepts(region, s))
    return min((s for s in strategies if is_free(s)), key=_taste)


def _taste(strategy: Strategy) -> tuple[int, Sequence[str]]:
    placements = [str(placement) for layout in strategy.forward if layout is not None for placement in layout]
    return sum(text.startswith("R") for text in placements), placements
