"""Regions: what runs between module boundaries, where layouts cannot change.

A redistribution sits at a module's input or output, or at a parameter's use. Ops that hand each other tensors inside
one module body therefore choose their layouts together. A *region* is a maximal set of such ops; its *slots* are the
tensors as seen in that body. A tensor that crosses a boundary into a body is an *entry* there: a new slot, linked to
the slot that it came from, and the link is where a redistribution may happen.

Equal regions of equal blocks (``model.layers.*.mlp``) are one `RegionClass`: they share their decision.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from planner.errors import ModelError
from planner.graph.op_graph import Crossing, Op, OpGraph, Ref, Value, leaves_of, overload_name
from planner.regions.module_bodies import OUTSIDE, ModuleBodies, SlotKey

SlotOrigin = Literal["entry", "parameter", "plain", "op"]
_BLOCK = re.compile(r"^((?:[^.]+\.)*?\d+)(?:\.|$)")


def block_of(fqn: str) -> str | None:
    """Return the FQN of the block that module ``fqn`` is in (``model.layers.3``), None where it is in none."""
    match = _BLOCK.match(fqn)
    return match[1] if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One tensor as a region sees it."""

    value: Value
    origin: SlotOrigin
    source: SlotKey | None = None
    """For an entry: the slot that it comes from; None for what the caller of the model hands in."""
    boundary: Crossing | None = None
    """For an entry: the boundary at which it may be redistributed."""
    parameter: str | None = None
    """For a parameter: the FQN that this region uses it by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOp:
    """An op of a region: ``inputs`` and ``outputs`` are indices of slots."""

    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Ops of one module call that choose their layouts together."""

    index: int
    call: int
    fqn: str
    slots: tuple[Slot, ...]
    ops: tuple[RegionOp, ...]
    exits: tuple[int, ...]
    """Slots that entries of other regions come from."""
    signature: Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionClass:
    """Regions that are equal but for the number of their block."""

    index: int
    pattern: str
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An edge between regions: entry ``consumer_slot`` of one comes from ``producer_slot`` of another."""

    producer: int
    producer_slot: int
    consumer: int
    consumer_slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGraph:
    """All regions of a graph, their classes, and the links between them."""

    graph: OpGraph
    regions: tuple[Region, ...]
    classes: tuple[RegionClass, ...]
    class_of: tuple[int, ...]
    links: tuple[Link, ...]


def is_sent(region: Region, slot: Slot) -> bool:
    """Tell whether a slot shows what a pipeline stage hands on; beside that only the loss is seen outside."""
    return region.call == OUTSIDE and slot.origin == "entry" and bool(slot.value.shape)


def is_received(slot: Slot) -> bool:
    """Tell whether a slot shows what a pipeline stage is handed, and sends a gradient back for."""
    return slot.source is None and slot.value.kind == "input" and slot.value.requires_grad


def _is_free_plain(graph: OpGraph, op: Op) -> bool:
    """Tell whether ``op`` reads plain values and parameters only, so that the plain ones decide its layout."""
    return all(graph.values[value].kind in ("plain", "parameter") for value in op.inputs)


class _Union:
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


def _slot_key(frames: ModuleBodies, value: str, call: int) -> SlotKey:
    return (value, call) if (value, call) in frames.entries else (value, frames.home.get(value, call))


def build_regions(graph: OpGraph, *, fold: bool = True) -> RegionGraph:
    """Return the regions of ``graph``, their classes, and the links between them.

    Args:
        fold: whether equal regions are one class; otherwise each decides for itself, which takes long to solve.
    """
    frames = ModuleBodies(graph)
    union = _Union()
    live_ops = [op for op in graph.ops if any(graph.values[v].kind == "activation" for v in op.outputs)]
    for key, (_, _) in frames.entries.items():
        if graph.values[key[0]].kind != "plain":
            union.find(("slot", key))
    for op in live_ops:
        union.find(("op", op.name))
        for value in (*op.inputs, *op.outputs):
            kind = graph.values[value].kind
            if kind == "parameter" or (
                kind == "plain" and not (_is_free_plain(graph, op) and (value, op.call) in frames.entries)
            ):
                continue
            union.join(("op", op.name), ("slot", _slot_key(frames, value, op.call)))
    members: dict[Hashable, list[Any]] = defaultdict(list)
    for op in live_ops:
        members[union.find(("op", op.name))].append(op)
    for key in frames.entries:
        if graph.values[key[0]].kind != "plain":
            members[union.find(("slot", key))].append(key)
    regions: list[Region] = []
    for items in members.values():
        ops = [item for item in items if isinstance(item, Op)]
        keys = [item for item in items if not isinstance(item, Op)]
        regions.append(_build_region(graph, frames, len(regions), ops, keys))
    return _link(graph, regions, fold)


def _build_region(graph: OpGraph, frames: ModuleBodies, index: int, ops: list[Op], keys: list[SlotKey]) -> Region:
    slots: list[Slot] = []
    positions: dict[Hashable, int] = {}
    call = ops[0].call if ops else keys[0][1]
    fqn = "" if call == OUTSIDE else graph.calls[call].fqn

    def position(value: str, op: Op) -> int:
        kind = graph.values[value].kind
        if kind == "parameter":
            key: Hashable = ("parameter", value)
            slot = Slot(value=graph.values[value], origin="parameter", parameter=_used_name(graph, value, fqn))
        elif kind == "plain" and (value, op.call) in frames.entries and _is_free_plain(graph, op):
            key = (value, op.call)
            slot = Slot(
                value=graph.values[value], origin="entry", source=None, boundary=frames.entries[value, op.call][1]
            )
        elif kind == "plain":
            key = ("plain", value)
            slot = Slot(value=graph.values[value], origin="plain")
        else:
            key = _slot_key(frames, value, op.call)
            slot = _slot(key)
        if key not in positions:
            positions[key] = len(slots)
            slots.append(slot)
        return positions[key]

    def _slot(key: SlotKey) -> Slot:
        if key in frames.entries:
            source, boundary = frames.entries[key]
            return Slot(value=graph.values[key[0]], origin="entry", source=source, boundary=boundary)
        return Slot(value=graph.values[key[0]], origin="op")

    for key in keys:
        positions[key] = len(slots)
        slots.append(_slot(key))
    region_ops = []
    for op in ops:
        inputs = tuple(position(value, op) for value in op.inputs)
        outputs = tuple(position(value, op) for value in op.outputs)
        region_ops.append(RegionOp(op=op, inputs=inputs, outputs=outputs))
    signature = (
        re.sub(r"\d+", "*", fqn),
        tuple(_slot_signature(slot) for slot in slots),
        tuple(_op_signature(op) for op in region_ops),
    )
    return Region(
        index=index, call=call, fqn=fqn, slots=tuple(slots), ops=tuple(region_ops), exits=(), signature=signature
    )


def _used_name(graph: OpGraph, value: str, fqn: str) -> str:
    """Return the FQN by which module ``fqn`` (or the nearest module around it) owns the parameter."""
    names = graph.parameters[value]
    best = [name for name in names if name.rpartition(".")[0] == fqn]
    around = [name for name in names if (fqn + ".").startswith(name.rpartition(".")[0] + ".") or "." not in name]
    chosen = best or sorted(around, key=len, reverse=True)
    if not chosen:
        raise ModelError(
            f"module {fqn or '(root)'!r} uses parameter {names[0]!r} of another module that it is not part of",
            what_to_do="pass the tensor as an argument, or register the parameter on the module that uses it",
            module=fqn,
        )
    return chosen[0]


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
    )


def op_signature(op: Op, inputs: tuple[Value, ...]) -> Hashable:
    """Return a key equal for ops that behave alike: same target, same arguments, same shapes."""
    counter = iter(range(len(inputs)))

    def text(leaf: Any) -> Any:
        return f"#{next(counter)}" if isinstance(leaf, Ref) else repr(leaf)

    leaves = tuple(text(leaf) for leaf in leaves_of((op.args, op.kwargs)))
    is_overload = isinstance(op.target, torch._ops.OpOverload)
    # A captured submodule is what its code says.
    target = overload_name(op.target) if is_overload else str(getattr(op.target, "code", op.target))
    tensors = tuple((value.shape, value.dtype, value.requires_grad, value.kind == "plain") for value in inputs)
    return (target, leaves, tuple(sorted(op.kwargs)), tensors, op.grad_enabled, op.is_zigzag)


def _op_signature(region_op: RegionOp) -> Hashable:
    leaves = leaves_of((region_op.op.args, region_op.op.kwargs))
    constants = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, Ref))
    return (region_op.op.target_name, constants, region_op.inputs, region_op.outputs)


def _link(graph: OpGraph, regions: list[Region], fold: bool) -> RegionGraph:
    where: dict[SlotKey, tuple[int, int]] = {}
    for region in regions:
        for position, slot in enumerate(region.slots):
            if slot.origin == "entry":
                where[slot.value.name, region.call] = (region.index, position)
        for region_op in region.ops:
            for position in region_op.outputs:
                if region.slots[position].origin == "op":
                    where[region.slots[position].value.name, region_op.op.call] = (region.index, position)
    links: list[Link] = []
    exits: dict[int, set[int]] = defaultdict(set)
    for region in regions:
        for position, slot in enumerate(region.slots):
            if slot.origin == "entry" and slot.source is not None:
                producer, producer_slot = where[slot.source]
                exits[producer].add(producer_slot)
                links.append(
                    Link(producer=producer, producer_slot=producer_slot, consumer=region.index, consumer_slot=position)
                )
    finished = tuple(dataclasses.replace(region, exits=tuple(sorted(exits[region.index]))) for region in regions)
    classes, class_of = _classify(finished, lambda region: None if fold else region.fqn)
    return RegionGraph(graph=graph, regions=finished, classes=classes, class_of=class_of, links=tuple(links))


def split_classes(regions: RegionGraph, part_of: Callable[[Region], Hashable]) -> RegionGraph:
    """Return folded ``regions`` with equal regions in one class only where ``part_of`` says the same of them."""
    classes, class_of = _classify(regions.regions, part_of)
    return dataclasses.replace(regions, classes=classes, class_of=class_of)


def _classify(
    regions: tuple[Region, ...], part_of: Callable[[Region], Hashable]
) -> tuple[tuple[RegionClass, ...], tuple[int, ...]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for region in regions:
        # Calls of one module are alike in any case: a plan has one key for them.
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


def find_op_inputs(region: Region, region_op: RegionOp) -> tuple[Value, ...]:
    """Return the values that an op of ``region`` reads."""
    return tuple(region.slots[position].value for position in region_op.inputs)
