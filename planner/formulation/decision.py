"""`Decision`: the strategies and stored layouts that a solver's assignment, or a `ShardingPlan`, stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cost_model.layouts.layout import Layout, format_layout, replicated
from planner.errors import PlanMismatchError
from planner.formulation.formulate import Formulation, Formulator
from planner.graph.layer_caches.decoding_step import state_path
from planner.graph.trace_module import ModuleNames
from planner.liveness.parameter_classes import ParameterClass
from planner.liveness.structure import Structure, hook_key
from planner.plan.patterns import resolve_keys
from planner.plan.ports import input_key, output_key, ports_of, resolve_input_ports, resolve_output_ports
from planner.plan.reshard import ReshardAfter, reshard_modes
from planner.plan.sharding_plan import Port, ShardingPlan
from planner.pricing.port_layouts import consumer_port, producer_port
from planner.pricing.storage_options import StorageOption
from planner.regions.regions import Region
from planner.strategies.enumerate import Strategy

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The choices of a plan.

    Attributes:
        strategies: for each region class, its strategy.
        stored: for each parameter class, its storage option.
        reshard_after: kind of block -> when its FSDP groups reshard; kinds that reshard after the forward are left out.
    """

    strategies: tuple[Strategy, ...]
    stored: tuple[StorageOption, ...]
    reshard_after: Mapping[str, ReshardAfter] = field(default_factory=dict)


def decision_from_assignment(formulation: Formulation, assignment: Sequence[int]) -> Decision:
    """Return the decision of an assignment, which has the index of a choice for each node of the problem."""
    regions, axis_node = len(formulation.strategies), len(formulation.strategies) + len(formulation.stored)
    stored = [choices[c] for choices, c in zip(formulation.stored, assignment[regions:axis_node], strict=True)]
    return Decision(
        strategies=tuple(choices[c] for choices, c in zip(formulation.strategies, assignment[:regions], strict=True)),
        stored=tuple(stored),
        reshard_after=formulation.fsdp_variables.reshard_after(stored, assignment[axis_node + 1 :]),
    )


class _Reader:
    """Reads the decision of a plan: it narrows down the candidate strategies of region classes until they agree."""

    def __init__(self, structure: Structure, formulator: Formulator, plan: ShardingPlan, module: ModuleNames) -> None:
        self._structure = structure
        self._formulator = formulator
        self._regions = structure.regions
        self._mesh = plan.mesh.shape
        names, modules = module.parameters, module.modules
        layouts: dict[str, Any] = {key: value for key, value in plan.plan.items() if not isinstance(value, str)}
        self._stored: dict[str, Layout] = resolve_keys(layouts, names, field="plan", what="parameter")
        self._compute: dict[str, Layout] = resolve_keys(
            dict(plan.compute_plan), names, field="compute_plan", what="parameter"
        )
        gradients = resolve_keys(dict(plan.gradient_plan), names, field="gradient_plan", what="parameter")
        self._gradients: dict[str, Layout] = gradients
        groups = resolve_keys(dict(plan.fully_shard), modules, field="fully_shard", what="module")
        self._reshard_after = reshard_modes(plan, modules, groups)
        self._with_block = {
            f"{block}.{name}" for block, block_parameters in groups.items() for name in block_parameters
        }
        self._ports: dict[tuple[str, str, str], Port] = {}
        for direction, resolved in (
            ("input", resolve_input_ports(plan.input_plan, modules)),
            ("output", resolve_output_ports(plan.output_plan, modules)),
        ):
            for fqn, spec in resolved.items():
                for path, port in ports_of(spec):
                    self._ports[fqn, direction, path] = port
        self._check_places()
        self._candidates = [
            [s for s in formulator.strategies(i) if self._fits(i, s)] for i in range(len(self._regions.classes))
        ]

    def _replicated(self) -> Layout:
        return replicated(len(self._mesh))

    def _fits(self, index: int, strategy: Strategy) -> bool:
        region = self._structure.representative(index)
        for position, slot in enumerate(region.slots):
            layout = strategy.forward[position]
            if slot.origin == "parameter" and slot.parameter is not None:
                stored = self._stored.get(slot.parameter, self._replicated())
                if layout != self._compute.get(slot.parameter, stored):
                    return False
            elif slot.origin == "entry":
                port = self._port(region, position)
                if (position in strategy.reallgathered) != (port is not None and port.reallgather):
                    return False
                if port is None:
                    if slot.source is None and layout != self._replicated():
                        return False
                    continue
                if layout != port.layout or (
                    port.grad is not None and strategy.gradient[position] not in (port.grad, None)
                ):
                    return False
        for region_op in region.ops:
            path = state_path(region_op.op)
            if path is not None:
                port = self._ports.get((region.fqn, "input", path))
                if port is not None and strategy.forward[region_op.outputs[0]] != port.layout:
                    return False
        return True

    def _check_places(self) -> None:
        """Raise an error for a port at a boundary where the search never redistributes: its cost would be missing.

        Raises:
            PlanMismatchError: there is such a port; the message names the boundary.
        """
        places = {
            hook_key(self._regions, slot.boundary)
            for region in self._regions.regions
            for slot in region.slots
            if slot.boundary is not None
        } | {
            (region.fqn, "input", path)
            for region in self._regions.regions
            for region_op in region.ops
            if (path := state_path(region_op.op)) is not None
        }
        self._only = Counter((fqn, direction) for fqn, direction, _ in places)
        for fqn, direction, path in self._ports:
            if (fqn, direction, path) in places or (path == "" and self._only[fqn, direction] == 1):
                continue
            key = input_key(fqn) if direction == "input" else output_key(fqn)
            suffix = f", {path!r}" if path else ""
            raise PlanMismatchError(
                f"{direction}_plan[{key!r}]{suffix} changes a layout where it cannot be priced: a tensor is "
                "redistributed at the last boundary that it passes on its way to an op, and of a model's results only "
                "the loss is.",
                subject="layouts",
                expected="ports where tensors enter the module that uses them",
                found=key,
                what_to_do="Say the layout at the input of the module that uses the tensor, or run the plan unpriced.",
            )

    def _port(self, region: Region, position: int) -> Port | None:
        boundary = region.slots[position].boundary
        assert boundary is not None
        fqn, direction, path = hook_key(self._regions, boundary)
        port = self._ports.get((fqn, direction, path))
        if port is None and self._only[fqn, direction] == 1:
            return self._ports.get((fqn, direction, ""))  # a module's only tensor needs no name
        return port

    def read(self) -> Decision:
        links = [
            (self._regions.class_of[link.producer], link.producer_slot, self._regions.class_of[link.consumer],
            link.consumer_slot,
             self._port(self._regions.regions[link.consumer], link.consumer_slot))
            for link in self._regions.links
        ]  # fmt: skip
        unique = list({(a, b, c, d): (a, b, c, d, port) for a, b, c, d, port in links}.values())
        self._refuse_empty()  # before `_narrow`, which would empty the neighbours of a class without candidates too
        self._narrow(unique)
        for index in range(len(self._candidates)):
            if len(self._candidates[index]) > 1:
                self._candidates[index] = self._candidates[index][:1]
                self._narrow(unique)
        self._refuse_empty()
        self._check_gathered_again()
        stored = [self._stored_choice(parameter) for parameter in self._structure.parameters]
        reshard_after = {
            block.kind: self._reshard_after[block.kind]
            for block in self._structure.fsdp_groups
            if block.kind in self._reshard_after
        }
        return Decision(
            strategies=tuple(c[0] for c in self._candidates), stored=tuple(stored), reshard_after=reshard_after
        )

    def _stored_choice(self, parameter: ParameterClass) -> StorageOption:
        name = self._regions.graph.parameters[parameter.values[0]][0]
        stored = self._stored.get(name, self._replicated())
        compute = self._compute.get(name, stored)
        changing = [axis for axis in range(len(stored)) if stored[axis] != compute[axis]]
        return StorageOption(
            stored=stored,
            accumulated=self._accumulated(parameter, name),
            fsdp_axes=tuple(changing) if name in self._with_block else None,
        )

    def _accumulated(self, parameter: ParameterClass, name: str) -> Layout | None:
        layout = self._gradients.get(name)
        if layout is not None or not parameter.is_used_again:
            return layout
        return next(self._candidates[index][0].gradient[slot] for index, slot in parameter.uses)

    def _refuse_empty(self) -> None:
        for index, candidates in enumerate(self._candidates):
            if not candidates:
                self._refuse(index)

    def _check_gathered_again(self) -> None:
        """Raise ``PlanMismatchError`` where ``reallgather`` is set on a redistribution other than an all-gather."""
        for key in self._structure.edges:
            producer, consumer = self._candidates[key.producer][0], self._candidates[key.consumer][0]
            port, region = consumer_port(consumer, key.consumer_slot), self._structure.representative(key.consumer)
            value = region.slots[key.consumer_slot].value
            source = producer_port(producer, key.producer_slot)
            if port.reallgather and self._formulator.redistribution_price(value, source, port) is None:
                self._refuse_reallgather(region, key.consumer_slot)

    def _refuse_reallgather(self, region: Region, position: int) -> None:
        boundary = region.slots[position].boundary
        assert boundary is not None
        fqn, _, path = hook_key(self._regions, boundary)
        raise PlanMismatchError(
            f"input_plan[{input_key(fqn)!r}], {path!r}, has reallgather where that cannot be priced: it is of inputs "
            "that one linear layer reads, outside of checkpointed blocks, and that are all-gathered for it.",
            subject="layouts",
            expected="reallgather at all-gathered inputs of linear layers",
            found=input_key(fqn),
            what_to_do="Leave reallgather out there, or run the plan unpriced.",
        )

    def _refuse(self, index: int) -> None:
        region = self._structure.representative(index)
        reallgather_layouts = {
            (slot, s.forward[slot]) for s in self._formulator.strategies(index) for slot in s.reallgathered
        }
        for position, slot in enumerate(region.slots):
            port = self._port(region, position) if slot.boundary is not None else None
            if port is not None and port.reallgather and (position, port.layout) not in reallgather_layouts:
                self._refuse_reallgather(region, position)
        layout_texts = []
        for position, slot in enumerate(region.slots):
            if slot.parameter is not None:
                stored = self._stored.get(slot.parameter, self._replicated())
                text = ", ".join(format_layout(self._compute.get(slot.parameter, stored)))
                layout_texts.append(f"{slot.parameter} computed ({text})")
            elif slot.boundary is not None:
                port = self._port(region, position)
                fqn, direction, path = hook_key(self._regions, slot.boundary)
                if port is not None:
                    text = ", ".join(format_layout(port.layout))
                    layout_texts.append(f"{direction} {path!r} of {fqn or '(root)'} as ({text})")
        raise PlanMismatchError(
            f"the plan's layouts around module {region.fqn or '(root)'!r} cannot run without further redistribution"
            + (f" ({'; '.join(layout_texts)})." if layout_texts else "."),
            subject="layouts",
            expected="layouts that its ops can run in",
            found="; ".join(layout_texts),
            what_to_do="Redistribute at the module's inputs (input_plan) or gather its parameters (compute_plan).",
        )

    def _narrow(self, links: Sequence[tuple[int, int, int, int, Port | None]]) -> None:
        """Remove candidates that agree with no candidate at the other end of a link, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for producer, producer_slot, consumer, consumer_slot, port in links:
                producer_ports = [self._sent(s, producer_slot, port) for s in self._candidates[producer]]
                consumer_ports = [self._wanted(s, consumer_slot, port) for s in self._candidates[consumer]]
                # A consumer without a gradient agrees with every layout of the producer's gradient.
                both = set(producer_ports) & set(consumer_ports)
                without = {f for f, g in consumer_ports if g is None} & {f for f, _ in producer_ports}
                for index, ports in ((producer, producer_ports), (consumer, consumer_ports)):
                    agreeing = [
                        s
                        for s, (forward, gradient) in zip(self._candidates[index], ports, strict=True)
                        if (forward, gradient) in both
                        or (forward in without and (gradient is None or index == producer))
                    ]
                    if len(agreeing) < len(ports):
                        self._candidates[index] = agreeing
                        changed = True
                        break

    @staticmethod
    def _sent(strategy: Strategy, slot: int, port: Port | None) -> tuple[Layout | None, Layout | None]:
        """Return the layouts (tensor, gradient) of the producer of a link, to compare with those of its consumer.

        With a port, the producer's layouts have to equal the port's source layouts. The result is then (None, None), as
        `_wanted` returns for a port.
        """
        if port is None:
            return strategy.forward[slot], strategy.gradient[slot]
        source = strategy.forward[slot] if port.source is None else port.source
        gradient = strategy.gradient[slot]
        if gradient is not None and port.source_grad is not None:
            gradient = port.source_grad  # a call without a gradient ignores it: it is that of the module's other calls
        return (
            (None, None)
            if (strategy.forward[slot], strategy.gradient[slot]) == (source, gradient)
            else (source, gradient)
        )

    @staticmethod
    def _wanted(strategy: Strategy, slot: int, port: Port | None) -> tuple[Layout | None, Layout | None]:
        return (strategy.forward[slot], strategy.gradient[slot]) if port is None else (None, None)


def decision_from_plan(
    structure: Structure, formulator: Formulator, plan: ShardingPlan, module: ModuleNames
) -> Decision:
    """Return the decision that ``plan`` states.

    Raises:
        PlanMismatchError: the ops of the model cannot run in the plan's layouts.
        PlanKeyError: a key matches nothing, or two keys contradict each other.
    """
    return _Reader(structure, formulator, plan, module).read()
