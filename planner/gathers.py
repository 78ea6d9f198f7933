"""The part of the program that decides how blocks gather: over which axis, and whether what they gather is kept.

A node for the axis holds all blocks to one (`fully_shard` splits a module on one), and a node for each kind of block
holds its parameters to one way between forward and backward, which one flat collective serves: dropped and gathered
again, or kept. What that costs is on the edges from parameters to the latter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from cost_model.layout import split_factor
from planner.block_gather_costs import BlockGatherPricer
from planner.charges import Charges
from planner.communication import Port, Price, add_prices
from planner.graph import Value
from planner.parameter_classes import BlockGather, ParameterClass
from planner.parameter_costs import StoredChoice
from planner.problem import Charge, Edge, Node
from planner.structure import Structure

_APART = -1
"""Port of a parameter that is not gathered with its block, on the edge to the axis."""
_DROPPED, _KEPT = 0, 1
"""Choices of a kind of block's node, and ports on the edges to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """What the blocks of a kind gather under a decision: ``numel`` elements each, over a mesh axis."""

    block: BlockGather
    axis: int
    numel: int
    kept: bool


class Gathers:
    """What of a run's `Problem` is about gathering with blocks."""

    def __init__(self, structure: Structure, pricer: BlockGatherPricer, mesh_shape: Sequence[int]) -> None:
        self._structure = structure
        self._pricer = pricer
        self._mesh = mesh_shape
        self._holders: dict[str, list[tuple[BlockGather, int]]] = defaultdict(list)
        for block in structure.gathers:
            for position, held in block.held.items():
                self._holders[structure.parameters[position].values[0]].append((block, held))

    def use_price(
        self, parameter: ParameterClass, choice: StoredChoice, port: Port, gradient_nbytes: float
    ) -> Price | None:
        """Return the price of using parameters that are gathered with their blocks; None where they cannot be."""
        held = tuple(self._holders.get(parameter.values[0], ()))
        gradients = gradient_nbytes, parameter.unreduced
        return self._pricer.use(self._value(parameter), choice, port, held, gradients) if held else None

    def nodes(self) -> list[Node]:
        """Return the node of the axis, and one for each kind of block: dropped, or kept."""
        ways: tuple[Charge, ...] = ({}, {}) if self._pricer.may_keep else ({},)
        return [
            Node(name="gathering axis", charges=tuple({} for _ in self._mesh)),
            *(Node(name=f"kept by {block.kind}", charges=ways) for block in self._structure.gathers),
        ]

    def charge_latency(
        self, gathered: Mapping[tuple[int, int], Sequence[tuple[int, int, int]]], charges: Charges
    ) -> None:
        """Charge what each kind of block pays once for its gathers before forwards, and its reductions.

        Args:
            gathered: (parameter class, axis) -> the pairs on edges that say that it is gathered so.
        """
        for block in self._structure.gathers:
            for axis in range(len(self._mesh)):
                members = tuple(m for position in block.held for m in gathered.get((position, axis), ()))
                if members:
                    charges.add(members, self._pricer.latency(block, axis, self._itemsize(block)).charge)

    def edges(
        self, parameters: int, stored: Sequence[tuple[StoredChoice, ...]], axis_node: int, first: int, charges: Charges
    ) -> list[Edge]:
        """Return the edges from parameters to the nodes, and charge what is paid once for kinds that gather again.

        Args:
            parameters: number of the first parameter class's node.
            axis_node: number of the axis's node.
            first: number of the first edge.
        """
        edges = list(self._axis_edges(parameters, stored, axis_node))
        for number, block in enumerate(self._structure.gathers):
            again: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
            for position in block.held:
                sizes = self._sizes(block, position, stored[position])
                if any(sizes):
                    for port, axis in {size: size[0] for size in sizes if size}.items():
                        again[axis].append((first + len(edges), _number(sizes, port), _DROPPED))
                    edges.append(self._kept_edge(block, sizes, parameters + position, axis_node + 1 + number))
            for axis, members in again.items():
                latency = self._pricer.latency_again(block, axis, self._itemsize(block))
                charges.add(tuple(members), latency.charge)
        return edges

    def _axis_edges(
        self, parameters: int, stored: Sequence[tuple[StoredChoice, ...]], axis_node: int
    ) -> Iterator[Edge]:
        axes = range(len(self._mesh))
        for position, choices in enumerate(stored):
            if any(choice.gathered_over is not None for choice in choices):
                yield Edge(
                    producer=parameters + position,
                    consumer=axis_node,
                    producer_ports=tuple(_APART if c.gathered_over is None else c.gathered_over for c in choices),
                    consumer_ports=tuple(axes),
                    pairs={(p, q): {} for p in (_APART, *axes) for q in axes if p in (_APART, q)},
                )

    def _sizes(
        self, block: BlockGather, position: int, choices: Sequence[StoredChoice]
    ) -> list[tuple[int, int] | None]:
        """Return, by choice of a parameter class, the axis and the elements that a block gathers of it, if it does."""
        value = self._value(self._structure.parameters[position])
        numel = block.held[position] * (value.nbytes // value.dtype.itemsize)
        return [
            None
            if (axis := choice.gathered_over) is None
            else (axis, numel * self._mesh[axis] // split_factor(choice.stored, self._mesh))
            for choice in choices
        ]

    def _kept_edge(
        self, block: BlockGather, sizes: Sequence[tuple[int, int] | None], producer: int, consumer: int
    ) -> Edge:
        """Return the edge from a parameter class to what blocks do with what they gathered: it has what that costs."""
        ways = (_DROPPED, _KEPT) if self._pricer.may_keep else (_DROPPED,)
        itemsize = self._itemsize(block)
        pairs: dict[tuple[int, int], Charge] = {}
        for size in dict.fromkeys(sizes):
            for way in ways:
                price = Price() if size is None else self._pricer.between(block, *size, itemsize, kept=way == _KEPT)
                pairs[_number(sizes, size), way] = price.charge
        return Edge(
            producer=producer,
            consumer=consumer,
            producer_ports=tuple(_number(sizes, size) for size in sizes),
            consumer_ports=ways,
            pairs=pairs,
        )

    # --- under a decision ----------------------------------------------------------------------------------------

    def chosen(self, stored: Sequence[StoredChoice], kept: AbstractSet[str]) -> Iterator[Gather]:
        """Yield what each kind of block gathers that gathers anything."""
        for block in self._structure.gathers:
            sizes = [size for p in block.held for size in self._sizes(block, p, stored[p : p + 1]) if size is not None]
            if sizes:
                numel = sum(numel for _, numel in sizes)
                yield Gather(block=block, axis=sizes[0][0], numel=numel, kept=block.kind in kept)

    def price(self, gather: Gather) -> Price:
        """Return the latency of a kind of block's gathers, what it takes to have them twice, and all collectives."""
        block, axis, numel, itemsize = gather.block, gather.axis, gather.numel, self._itemsize(gather.block)
        prices = [
            self._pricer.latency(block, axis, itemsize),
            self._pricer.between(block, axis, numel, itemsize, kept=gather.kept),
            self._pricer.collectives(block, axis, numel, itemsize, kept=gather.kept),
        ]
        if not gather.kept:
            prices.append(self._pricer.latency_again(block, axis, itemsize))
        return add_prices(prices)

    def _value(self, parameter: ParameterClass) -> Value:
        return self._structure.regions.graph.values[parameter.values[0]]

    def _itemsize(self, block: BlockGather) -> int:
        return self._value(self._structure.parameters[next(iter(block.held))]).dtype.itemsize


def _number(sizes: Sequence[tuple[int, int] | None], size: tuple[int, int] | None) -> int:
    """Return the port of choices that gather as much over the same axis, or nothing."""
    return list(dict.fromkeys(sizes)).index(size)


def kept_by(structure: Structure, stored: Sequence[StoredChoice], ways: Sequence[int]) -> frozenset[str]:
    """Return the kinds of blocks that keep what they gather, of those that gather anything.

    Args:
        ways: the choice of each kind's node.
    """
    return frozenset(
        block.kind
        for block, way in zip(structure.gathers, ways, strict=True)
        if way == _KEPT and any(stored[position].gathered_over is not None for position in block.held)
    )
