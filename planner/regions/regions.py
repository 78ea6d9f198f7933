"""Regions: the sets of ops between module boundaries, inside which layouts cannot change.

A redistribution happens at a module's input or output, or where an op uses a parameter. Ops of one module body that
pass tensors to each other therefore choose their layouts together. A *region* is a maximal set of such ops. Its *slots*
are the tensors that these ops read and write. A tensor that crosses a module boundary into a body is an *entry* there:
it has a slot of its own, and a link to the slot that it comes from. A redistribution can happen on each link.

Equal regions of equal blocks (``model.layers.*.mlp``) form one `RegionClass` and share their decision.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from planner.graph.op_graph import Crossing, Op, OpGraph, Ref, Value, leaves_of, overload_name, writes_plain
from planner.regions.module_bodies import OUTSIDE, ModuleBodies, SlotKey
from planner.regions.parameter_readers import ParameterReaders, find_parameter_readers

SlotOrigin = Literal["entry", "parameter", "plain", "op"]
_BLOCK = re.compile(r"^((?:[^.]+\.)*?\d+)(?:\.|$)")


def block_of(fqn: str) -> str | None:
    """Return the FQN of the block that module ``fqn`` is in (``model.layers.3``); None where it is in none."""
    match = _BLOCK.match(fqn)
    return match[1] if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One tensor of a region.

    Attributes:
        origin: whether it enters through a module boundary, is a parameter, is a plain tensor, or is computed by an op.
        source: of an entry, the slot that it comes from; None for a model input.
        boundary: of an entry, the module boundary at which it may be redistributed.
        parameter: of a parameter, the FQN by which this region uses it.
        reader: of a parameter, the call of its reader (`planner.regions.parameter_readers`).
        is_result: whether it is a result from which the caller computes the loss: whole, or sharded by samples.
    """

    value: Value
    origin: SlotOrigin
    source: SlotKey | None = None
    boundary: Crossing | None = None
    parameter: str | None = None
    reader: int | None = None
    is_result: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOp:
    """An op of a region; ``inputs`` and ``outputs`` are indices of slots."""

    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Ops of one module call that choose their layouts together.

    Attributes:
        call: index of the module call; `OUTSIDE` for what the model's caller sees.
        fqn: FQN of the module.
        exits: slots that entries of other regions come from.
        signature: equal for regions with equal ops on equal tensors, in modules that differ only in their numbers.
    """

    index: int
    call: int
    fqn: str
    slots: tuple[Slot, ...]
    ops: tuple[RegionOp, ...]
    exits: tuple[int, ...]
    signature: Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionClass:
    """Regions that differ only in the number of their block.

    Attributes:
        pattern: FQN pattern of their modules.
        members: indices of the regions.
    """

    index: int
    pattern: str
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A tensor that passes from one region to another: entry ``consumer_slot`` comes from ``producer_slot``."""

    producer: int
    producer_slot: int
    consumer: int
    consumer_slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGraph:
    """All regions of a graph, their classes, and the links between them; ``class_of`` maps a region to its class."""

    graph: OpGraph
    readers: ParameterReaders
    regions: tuple[Region, ...]
    classes: tuple[RegionClass, ...]
    class_of: tuple[int, ...]
    links: tuple[Link, ...]


def is_sent(region: Region, slot: Slot) -> bool:
    """Return whether a slot is a tensor that leaves the root module and is not the loss, which is a scalar.

    A pipeline stage sends these tensors to the next stage.
    """
    return region.call == OUTSIDE and slot.origin == "entry" and bool(slot.value.shape)


def is_received(slot: Slot) -> bool:
    """Return whether a slot is a tensor that a pipeline stage receives, and whose gradient it sends back."""
    return slot.source is None and slot.value.kind == "input" and slot.value.requires_grad


def find_op_inputs(region: Region, region_op: RegionOp) -> tuple[Value, ...]:
    """Return the values that an op of ``region`` reads."""
    return tuple(region.slots[position].value for position in region_op.inputs)


# --- building regions ------------------------------------------------------------------------------------------------


class _DisjointSets:
    """Union-find over hashable items."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        self._parent.setdefault(item, item)
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def join(self, a: Hashable, b: Hashable) -> None:
        self._parent[self.find(a)] = self.find(b)


def build_regions(graph: OpGraph, *, fold: bool = True) -> RegionGraph:
    """Return the regions of ``graph``, their classes, and the links between them.

    Args:
        fold: whether equal regions form one class. Otherwise each decides for itself, which takes long to solve.
    """
    bodies = ModuleBodies(graph)
    sets = _DisjointSets()
    ops = [op for op in graph.ops if _has_layouts(graph, op)]
    entries = [key for key in bodies.entries if graph.values[key[0]].kind != "plain"]
    for key in entries:
        sets.find(("slot", key))
    for op in ops:
        sets.find(("op", op.name))
        for value in (*op.inputs, *op.outputs):
            if _connects_ops(graph, bodies, op, value):
                sets.join(("op", op.name), ("slot", _slot_key(bodies, value, op.call)))
    members: dict[Hashable, tuple[list[Op], list[SlotKey]]] = defaultdict(lambda: ([], []))
    for op in ops:
        members[sets.find(("op", op.name))][0].append(op)
    for key in entries:
        members[sets.find(("slot", key))][1].append(key)
    readers = find_parameter_readers(graph)
    regions = [_build_region(graph, bodies, readers, index, *items) for index, items in enumerate(members.values())]
    return _with_links(graph, readers, regions, fold)


def _has_layouts(graph: OpGraph, op: Op) -> bool:
    """Return whether ``op`` computes an activation, or writes one to a plain tensor."""
    computes = any(graph.values[name].kind == "activation" for name in op.outputs)
    return computes or writes_plain(op, [graph.values[name] for name in op.inputs])


def _connects_ops(graph: OpGraph, bodies: ModuleBodies, op: Op, value: str) -> bool:
    """Return whether ``op`` is in one region with the other ops that read or write this tensor."""
    kind = graph.values[value].kind
    if kind == "plain":
        return _decided_by_plain_entry(graph, bodies, op, value)
    return kind != "parameter"


def _decided_by_plain_entry(graph: OpGraph, bodies: ModuleBodies, op: Op, value: str) -> bool:
    """Return whether a plain tensor is an entry, and ``op``, which reads it, reads only plain tensors and parameters.

    The layout of such an op follows from its plain inputs alone, which may be sharded at the boundary.
    """
    reads_plain = all(graph.values[name].kind in ("plain", "parameter") for name in op.inputs)
    return reads_plain and (value, op.call) in bodies.entries


def _slot_key(bodies: ModuleBodies, value: str, call: int) -> SlotKey:
    return (value, call) if (value, call) in bodies.entries else (value, bodies.home.get(value, call))


def _build_region(
    graph: OpGraph,
    bodies: ModuleBodies,
    readers: ParameterReaders,
    index: int,
    ops: Sequence[Op],
    entries: Sequence[SlotKey],
) -> Region:
    call = ops[0].call if ops else entries[0][1]
    fqn = "" if call == OUTSIDE else graph.calls[call].fqn
    slots: list[Slot] = []
    positions: dict[Hashable, int] = {}

    def position(key: Hashable, slot: Slot) -> int:
        if key not in positions:
            positions[key] = len(slots)
            slots.append(slot)
        return positions[key]

    for key in entries:
        position(key, _slot(graph, bodies, key))
    region_ops = []
    for op in ops:
        inputs = tuple(position(*_keyed_slot(graph, bodies, readers, op, value)) for value in op.inputs)
        outputs = tuple(position(*_keyed_slot(graph, bodies, readers, op, value)) for value in op.outputs)
        region_ops.append(RegionOp(op=op, inputs=inputs, outputs=outputs))
    signature = (
        re.sub(r"\d+", "*", fqn),
        tuple(_slot_signature(slot) for slot in slots),
        tuple(_region_op_signature(op) for op in region_ops),
    )
    return Region(
        index=index, call=call, fqn=fqn, slots=tuple(slots), ops=tuple(region_ops), exits=(), signature=signature
    )


def _slot(graph: OpGraph, bodies: ModuleBodies, key: SlotKey) -> Slot:
    if key in bodies.entries:
        source, boundary = bodies.entries[key]
        value = graph.values[key[0]]
        is_result = key[1] == OUTSIDE and value.requires_grad and value.name in bodies.results
        return Slot(value=value, origin="entry", source=source, boundary=boundary, is_result=is_result)
    return Slot(value=graph.values[key[0]], origin="op")


def _keyed_slot(
    graph: OpGraph, bodies: ModuleBodies, readers: ParameterReaders, op: Op, value: str
) -> tuple[Hashable, Slot]:
    """Return the slot of a tensor that ``op`` reads or writes, and a key that is the same for all ops of the region."""
    tensor = graph.values[value]
    if tensor.kind == "parameter":
        read = op.name, value
        slot = Slot(value=tensor, origin="parameter", parameter=readers.names[read], reader=readers.calls[read])
        return ("parameter", value), slot
    if tensor.kind == "plain" and _decided_by_plain_entry(graph, bodies, op, value):
        _, boundary = bodies.entries[value, op.call]
        return (value, op.call), Slot(value=tensor, origin="entry", source=None, boundary=boundary)
    if tensor.kind == "plain":
        return ("plain", value), Slot(value=tensor, origin="plain")
    key = _slot_key(bodies, value, op.call)
    return key, _slot(graph, bodies, key)


# --- signatures ------------------------------------------------------------------------------------------------------


def _slot_signature(slot: Slot) -> Hashable:
    parameter = slot.parameter.rpartition(".")[2] if slot.parameter else None
    path = (slot.boundary.direction, slot.boundary.path) if slot.boundary else None
    return (
        slot.origin,
        slot.value.shape,
        slot.value.dtype,
        slot.value.requires_grad,
        parameter,
        path,
        slot.source is None,
        slot.is_result,
    )


def _region_op_signature(region_op: RegionOp) -> Hashable:
    leaves = leaves_of((region_op.op.args, region_op.op.kwargs))
    constants = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, Ref))
    flags = region_op.op.is_local, region_op.op.cache
    return (region_op.op.target_name, *flags, constants, region_op.inputs, region_op.outputs)


def op_signature(op: Op, inputs: tuple[Value, ...]) -> Hashable:
    """Return a key that is equal for ops with the same target, the same arguments and inputs of the same shapes."""
    counter = iter(range(len(inputs)))

    def text(leaf: Any) -> Any:
        return f"#{next(counter)}" if isinstance(leaf, Ref) else repr(leaf)

    leaves = tuple(text(leaf) for leaf in leaves_of((op.args, op.kwargs)))
    is_overload = isinstance(op.target, torch._ops.OpOverload)
    # The target of a captured submodule is identified by its code.
    target = overload_name(op.target) if is_overload else str(getattr(op.target, "code", op.target))
    tensors = tuple((value.shape, value.dtype, value.requires_grad, value.kind == "plain") for value in inputs)
    flags = op.grad_enabled, op.is_zigzag, op.is_local, op.cache
    return (target, leaves, tuple(sorted(op.kwargs)), tensors, *flags)


# --- links and classes -----------------------------------------------------------------------------------------------


def _with_links(graph: OpGraph, readers: ParameterReaders, regions: Sequence[Region], fold: bool) -> RegionGraph:
    slot_of: dict[SlotKey, tuple[int, int]] = {}
    for region in regions:
        for position, slot in enumerate(region.slots):
            if slot.origin == "entry":
                slot_of[slot.value.name, region.call] = (region.index, position)
        for region_op in region.ops:
            for position in region_op.outputs:
                if region.slots[position].origin == "op":
                    slot_of[region.slots[position].value.name, region_op.op.call] = (region.index, position)
    links: list[Link] = []
    exits: dict[int, set[int]] = defaultdict(set)
    for region in regions:
        for position, slot in enumerate(region.slots):
            if slot.origin == "entry" and slot.source is not None:
                producer, producer_slot = slot_of[slot.source]
                exits[producer].add(producer_slot)
                links.append(
                    Link(producer=producer, producer_slot=producer_slot, consumer=region.index, consumer_slot=position)
                )
    linked = tuple(dataclasses.replace(region, exits=tuple(sorted(exits[region.index]))) for region in regions)
    classes, class_of = _classify(linked, lambda region: None if fold else region.fqn)
    return RegionGraph(
        graph=graph, readers=readers, regions=linked, classes=classes, class_of=class_of, links=tuple(links)
    )


def split_classes(regions: RegionGraph, part_of: Callable[[Region], Hashable]) -> RegionGraph:
    """Return ``regions`` with equal regions in one class only if ``part_of`` returns the same for them."""
    classes, class_of = _classify(regions.regions, part_of)
    return dataclasses.replace(regions, classes=classes, class_of=class_of)


def _classify(
    regions: tuple[Region, ...], part_of: Callable[[Region], Hashable]
) -> tuple[tuple[RegionClass, ...], tuple[int, ...]]:
    """Return the classes of ``regions``, and the class of each region.

    Calls of one module are in one class in any case, because a plan has one key for them.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for region in regions:
        groups[region.signature, region.exits, part_of(region)].append(region.index)
    class_of = [0] * len(regions)
    classes: list[RegionClass] = []
    for members in groups.values():
        for member in members:
            class_of[member] = len(classes)
        first = regions[members[0]]
        pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", first.fqn) if part_of(first) is None else first.fqn
        classes.append(RegionClass(index=len(classes), pattern=pattern, members=tuple(members)))
    return tuple(classes), tuple(class_of)
