"""The entries of a plan that a decision is written as: layouts and ports by patterns of FQNs."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cost_model.layouts.layout import Layout, replicated
from planner.formulation.decision import Decision
from planner.graph.layer_caches.decoding_step import state_path
from planner.graph.trace_module import ModuleNames
from planner.liveness.structure import Structure, hook_key
from planner.plan.patterns import match_keys
from planner.plan.ports import PortSpec, input_key, output_key
from planner.plan.reshard import ReshardAfter
from planner.plan.sharding_plan import Port
from planner.pricing.storage_options import StorageOption
from planner.regions.regions import Link, Slot, block_of
from planner.strategies.enumerate import Strategy

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntries:
    """The fields of a `ShardingPlan` that state layouts, ports and FSDP groups."""

    plan: Mapping[str, Layout]
    compute_plan: Mapping[str, Layout]
    gradient_plan: Mapping[str, Layout]
    read_above: Mapping[str, int]
    input_plan: Mapping[str, PortSpec]
    output_plan: Mapping[str, PortSpec]
    fully_shard: Mapping[str, tuple[str, ...]]
    keep_gathered: tuple[str, ...]
    keep_gathered_for_step: tuple[str, ...]

    def by_field(self) -> dict[str, Any]:
        """Return field name -> value, as arguments of `ShardingPlan`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def fold_names(entries: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """Return ``entries`` with one pattern in place of keys that differ only in numbers and have equal entries.

    A pattern with ``*`` is used only if all ``names`` that it matches have equal entries. Otherwise successive blocks
    with equal entries share a key, such as ``layers.{0-7}.mlp``.

    Args:
        entries: FQN -> entry.
        names: all FQNs that a pattern could match.
    """
    by_pattern: dict[str, list[str]] = defaultdict(list)
    pattern_of = {name: _pattern(name) for name in entries}
    for name in names:
        by_pattern[pattern_of.get(name) or _pattern(name)].append(name)
    # The pattern of one name may match others too, that have a word where it has a number.
    matching = match_keys(dict.fromkeys(pattern_of.values()), by_pattern)
    matched = {
        pattern: [name for other in others for name in by_pattern[other]] for pattern, others in matching.items()
    }
    agreed = {
        pattern
        for pattern, fqns in matched.items()
        if len(fqns) > 1 and all(name in entries and entries[name] == entries[fqns[0]] for name in fqns)
    }
    apart = {name: entry for name, entry in entries.items() if pattern_of[name] not in agreed}
    rows = _rows(apart)
    return {pattern_of[name] if pattern_of[name] in agreed else rows[name]: entry for name, entry in entries.items()}


def _rows(entries: Mapping[str, T]) -> dict[str, str]:
    """Return name -> key in the plan. Names in successive blocks with equal entries share a key."""
    lists: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in entries:
        block = block_of(name)
        if block is not None:
            start = block[: -len(block.rpartition(".")[2])]
            lists[start, name[len(block) :]][int(block[len(start) :])] = name
    keys = {name: name for name in entries}
    for (start, end), by_number in lists.items():
        for row in _in_a_row({number: entries[name] for number, name in by_number.items()}):
            if len(row) > 1:
                keys.update({by_number[number]: f"{start}{{{row[0]}-{row[-1]}}}{end}" for number in row})
    return keys


def _in_a_row(entries: Mapping[int, T]) -> list[list[int]]:
    """Return the numbers in ascending order, grouped in rows of successive numbers with equal entries."""
    rows: list[list[int]] = []
    for number in sorted(entries):
        if rows and number == rows[-1][-1] + 1 and entries[number] == entries[rows[-1][-1]]:
            rows[-1].append(number)
        else:
            rows.append([number])
    return rows


def _pattern(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEntries:
    """The layouts of a decision by the FQNs of parameters and modules. Every block has entries of its own.

    Attributes:
        stored, compute, gradients: parameter -> layout; ``compute`` only if it differs from the stored layout.
        read_above: parameter -> levels between its module and its reader, where ``compute`` has the parameter.
        inputs, outputs: module -> path of an argument -> port.
        fsdp_groups: block -> names, relative to it, of the parameters of its FSDP group.
        reshard_after: block -> when its FSDP group reshards; groups that reshard after the forward are left out.
    """

    stored: dict[str, Layout] = field(default_factory=dict)
    compute: dict[str, Layout] = field(default_factory=dict)
    gradients: dict[str, Layout] = field(default_factory=dict)
    read_above: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, dict[str, Port]] = field(default_factory=dict)
    outputs: dict[str, dict[str, Port]] = field(default_factory=dict)
    fsdp_groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reshard_after: dict[str, ReshardAfter] = field(default_factory=dict)

    def renamed(self, name: Callable[[str], str]) -> NamedEntries:
        """Return the entries with ``name`` applied to every FQN."""

        def under(entries: Mapping[str, T]) -> dict[str, T]:
            return {name(key): value for key, value in entries.items()}

        return NamedEntries(
            stored=under(self.stored),
            compute=under(self.compute),
            gradients=under(self.gradients),
            read_above=under(self.read_above),
            inputs=under(self.inputs),
            outputs=under(self.outputs),
            fsdp_groups=under(self.fsdp_groups),
            reshard_after=under(self.reshard_after),
        )

    def update(self, other: NamedEntries) -> None:
        """Add the entries of another part of the model. Ports of a module in both parts are merged by argument."""
        self.stored.update(other.stored)
        self.compute.update(other.compute)
        self.gradients.update(other.gradients)
        self.read_above.update(other.read_above)
        self.fsdp_groups.update(other.fsdp_groups)
        self.reshard_after.update(other.reshard_after)
        for own, other_ports in ((self.inputs, other.inputs), (self.outputs, other.outputs)):
            for module, ports in other_ports.items():
                own.setdefault(module, {}).update(ports)

    def folded(self, module: ModuleNames) -> PlanEntries:
        """Return the plan's entries, with one key for blocks that agree. Parameters that no op uses are replicated."""
        names, modules = module.parameters, module.modules
        axes = len(next(iter(self.stored.values()))) if self.stored else 0
        unused = {name: replicated(axes) for name in names if axes and name not in self.stored}
        stored = {**self.stored, **unused}
        # All fields of the plan name a parameter by the same key.
        layouts = fold_names(
            {
                name: (stored.get(name), self.compute.get(name), self.gradients.get(name), self.read_above.get(name))
                for name in names
            },
            names,
        )
        return PlanEntries(
            plan={key: layout for key, (layout, _, _, _) in layouts.items() if layout is not None},
            compute_plan={key: layout for key, (_, layout, _, _) in layouts.items() if layout is not None},
            gradient_plan={key: layout for key, (_, _, layout, _) in layouts.items() if layout is not None},
            read_above={key: levels for key, (_, _, _, levels) in layouts.items() if levels is not None},
            input_plan={input_key(fqn): _spec(ports) for fqn, ports in fold_names(self.inputs, modules).items()},
            output_plan={output_key(fqn): _spec(ports) for fqn, ports in fold_names(self.outputs, modules).items()},
            fully_shard=fold_names(self.fsdp_groups, modules),
            keep_gathered=self._resharding(ReshardAfter.BACKWARD, modules),
            keep_gathered_for_step=self._resharding(ReshardAfter.STEP, modules),
        )

    def _resharding(self, after: ReshardAfter, modules: Iterable[str]) -> tuple[str, ...]:
        return tuple(
            fold_names(
                {block: True for block in sorted(self.reshard_after) if self.reshard_after[block] is after}, modules
            )
        )


def named_entries(structure: Structure, decision: Decision) -> NamedEntries:
    """Return the layouts of ``decision`` by FQN."""
    regions = structure.regions
    entries = NamedEntries()
    by_value: dict[str, StorageOption] = {}
    fsdp_groups: dict[str, list[str]] = defaultdict(list)
    for parameter, choice in zip(structure.parameters, decision.stored, strict=True):
        for value in parameter.values:
            by_value[value] = choice
            if choice.fsdp_axes is not None:
                (name,) = regions.graph.parameters[value]
                block = block_of(name)
                assert block is not None
                fsdp_groups[block].append(name[len(block) + 1 :])
            for name in regions.graph.parameters[value]:
                entries.stored[name] = choice.stored
                if choice.accumulated is not None:
                    entries.gradients[name] = choice.accumulated
    links = {(link.consumer, link.consumer_slot): link for link in regions.links}
    for region in regions.regions:
        strategy = decision.strategies[regions.class_of[region.index]]
        for position, slot in enumerate(region.slots):
            layout = strategy.forward[position]
            if slot.origin == "parameter" and slot.parameter is not None and layout is not None:
                if layout != by_value[slot.value.name].stored:
                    names = (slot.parameter, *regions.readers.tied.get(slot.parameter, ()))
                    entries.compute.update(dict.fromkeys(names, layout))
            elif slot.origin == "entry" and slot.boundary is not None:
                port = _port(structure, decision, slot, links.get((region.index, position)), position, strategy)
                if port is not None:
                    fqn, direction, _ = hook_key(regions, slot.boundary)
                    ports = (entries.inputs if direction == "input" else entries.outputs).setdefault(fqn, {})
                    for path in slot.boundary.paths:
                        # The calls of a module have equal ports, but only a call with a gradient has its layout.
                        if port.grad is not None or path not in ports:
                            ports[path] = port
        for region_op in region.ops:
            state, layout = state_path(region_op.op), strategy.forward[region_op.outputs[0]]
            if state is not None and layout is not None:
                entries.inputs.setdefault(region.fqn, {})[state] = Port(layout=layout)
    levels = regions.readers.levels
    in_groups = {
        name
        for value, choice in by_value.items()
        if choice.fsdp_axes is not None
        for name in regions.graph.parameters[value]
    }
    redistributed = (*entries.compute, *entries.gradients)
    entries.read_above.update({n: levels[n] for n in redistributed if n in levels and n not in in_groups})
    entries.fsdp_groups.update({block: tuple(sorted(names)) for block, names in fsdp_groups.items()})
    for gather in structure.fsdp_groups:
        if gather.kind in decision.reshard_after:
            entries.reshard_after.update(dict.fromkeys(gather.blocks, decision.reshard_after[gather.kind]))
    return entries


def decision_entries(structure: Structure, decision: Decision, module: ModuleNames) -> PlanEntries:
    """Return the plan's entries for ``decision``."""
    return named_entries(structure, decision).folded(module)


def _spec(ports: Mapping[str, Port]) -> PortSpec:
    """Return the shortest form of ports by argument path."""
    return ports[""] if set(ports) == {""} else dict(sorted(ports.items()))


def _port(
    structure: Structure, decision: Decision, slot: Slot, link: Link | None, position: int, strategy: Strategy
) -> Port | None:
    """Return the port of an entry of a region; None if its tensor is not redistributed there.

    Args:
        link: the link that leads to the entry; None: the entry is a model input or a plain tensor.
        position: index of the entry among the slots of its region.
        strategy: the strategy of this region.
    """
    layout, gradient = strategy.forward[position], strategy.gradient[position]
    assert layout is not None
    if link is None:
        if slot.value.kind == "input":
            return Port(layout=layout)
        whole = replicated(len(layout))
        return Port(layout=layout, source=whole) if layout != whole else None
    producer = decision.strategies[structure.regions.class_of[link.producer]]
    source, source_gradient = producer.forward[link.producer_slot], producer.gradient[link.producer_slot]
    if (source, source_gradient) == (layout, gradient):
        return None
    again = position in strategy.reallgathered
    return Port(layout=layout, grad=gradient, source=source, source_grad=source_gradient, reallgather=again)
