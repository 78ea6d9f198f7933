"""FSDP groups in the integer program: the mesh axes that blocks all-gather over, and `reshard_after_forward`.

`fully_shard` shards a module over one mesh axis, or over two that act as one. One node chooses these axes for all
blocks. A further node for each kind of block chooses its `ReshardAfter` for all its parameters, because one flat
collective gathers them: they are resharded after the forward (and all-gathered again in the backward), after the
backward, or after the step. The edges from parameter classes to these further nodes carry the charges of all-gathers
and reductions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_model.layouts.uneven import piece_numel
from planner.graph.op_graph import Value
from planner.ilp.problem import Edge, Node
from planner.ilp.quantities import Charge
from planner.ilp.shared_charges import SharedChargeCollector
from planner.liveness.parameter_classes import FsdpGroup, ParameterClass
from planner.liveness.structure import Structure
from planner.plan.reshard import ReshardAfter
from planner.pricing.fsdp_group_costs import FsdpGroupPricer, GroupSizes
from planner.pricing.port_layouts import PortLayouts
from planner.pricing.price import FREE, Price, add_prices
from planner.pricing.storage_options import StorageOption, fsdp_axis_groups

_APART = -1
"""Port of a storage option without an FSDP group, on the edge to the node of the axes."""

Size = tuple[tuple[int, ...], GroupSizes]
"""(mesh axes that a block all-gathers over, elements on one device)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpGroupChoice:
    """The chosen FSDP group of each block of one kind.

    Attributes:
        block: the kind of block.
        axes: indices of the mesh axes, which act as one, that the group is all-gathered over.
        sizes: elements on one device.
        reshard_after: when the group reshards.
    """

    block: FsdpGroup
    axes: tuple[int, ...]
    sizes: GroupSizes
    reshard_after: ReshardAfter


class FsdpVariables:
    """The nodes, edges and charges of FSDP groups in the `Problem` of a run."""

    def __init__(self, structure: Structure, pricer: FsdpGroupPricer, mesh_shape: Sequence[int]) -> None:
        self._structure = structure
        self._pricer = pricer
        self._mesh = mesh_shape
        self._over = fsdp_axis_groups(mesh_shape)
        self._holders: dict[str, list[tuple[FsdpGroup, int]]] = defaultdict(list)
        for block in structure.fsdp_groups:
            for position, count in block.parameter_counts.items():
                self._holders[structure.parameters[position].values[0]].append((block, count))

    def use_price(self, parameter: ParameterClass, port: PortLayouts, gradient_nbytes: float) -> Price | None:
        """Return the price of one use of a parameter class in FSDP groups; None: none of its parameters can be in one.

        Args:
            port: the layouts of parameter and gradient in the use.
            gradient_nbytes: bytes of one reduced gradient.
        """
        holders = tuple(self._holders.get(parameter.values[0], ()))
        gradients = gradient_nbytes, parameter.unreduced
        return self._pricer.use(self._value(parameter), port, holders, gradients) if holders else None

    def nodes(self) -> list[Node]:
        """Return the node of the axes, and for each kind of block the node of its `ReshardAfter`."""
        ways: tuple[Charge, ...] = tuple({} for _ in self._pricer.reshard_options)
        return [
            Node(name="gathering axes", charges=tuple({} for _ in self._over)),
            *(Node(name=f"reshard after: {block.kind}", charges=ways) for block in self._structure.fsdp_groups),
        ]

    def edges(
        self,
        parameters: int,
        stored: Sequence[tuple[StorageOption, ...]],
        axes_node: int,
        first: int,
        charges: SharedChargeCollector,
    ) -> list[Edge]:
        """Return the edges from parameter classes to `nodes`, and add the latency of each FSDP group to ``charges``.

        Args:
            parameters: index of the first parameter class's node in the problem.
            stored: for each parameter class, its storage options.
            axes_node: index of the node of the axes in the problem.
            first: index that the first returned edge will have in the problem.
            charges: collects the charges that several edges share.
        """
        edges = list(self._axes_edges(parameters, stored, axes_node))
        for number, block in enumerate(self._structure.fsdp_groups):
            gathered: dict[tuple[tuple[int, ...], int], list[tuple[int, int, int]]] = defaultdict(list)
            reduced: dict[tuple[tuple[int, ...], int], list[tuple[int, int, int]]] = defaultdict(list)
            for position in block.parameter_counts:
                sizes = self._sizes(block, position, stored[position])
                if any(sizes):
                    for size in dict.fromkeys(size for size in sizes if size is not None):
                        for way in range(len(self._pricer.reshard_options)):
                            pair = first + len(edges), _number(sizes, size), way
                            gathered[size[0], way].append(pair)
                            if size[1].reduced:
                                reduced[size[0], way].append(pair)
                    edges.append(self._reshard_edge(block, sizes, parameters + position, axes_node + 1 + number))
            ways = self._pricer.reshard_options
            for (axes, way), pairs in gathered.items():
                charges.add(tuple(pairs), self._pricer.gather_latency(block, axes, ways[way]).charge)
            for (axes, way), pairs in reduced.items():
                charges.add(tuple(pairs), self._pricer.reduce_latency(block, axes, ways[way]).charge)
        return edges

    def _axes_edges(
        self, parameters: int, stored: Sequence[tuple[StorageOption, ...]], axes_node: int
    ) -> Iterator[Edge]:
        over = range(len(self._over))
        for position, choices in enumerate(stored):
            if any(choice.fsdp_axes is not None for choice in choices):
                yield Edge(
                    producer=parameters + position,
                    consumer=axes_node,
                    producer_ports=tuple(
                        _APART if c.fsdp_axes is None else self._over.index(c.fsdp_axes) for c in choices
                    ),
                    consumer_ports=tuple(over),
                    pairs={(p, q): {} for p in (_APART, *over) for q in over if p in (_APART, q)},
                )

    def _sizes(self, block: FsdpGroup, position: int, choices: Sequence[StorageOption]) -> list[Size | None]:
        """Return, for each storage option of a parameter class, the `Size` that a block all-gathers; None: no group."""
        value = self._value(self._structure.parameters[position])
        rounded = self._structure.regions.graph.rounded
        nbytes = block.parameter_counts[position] * value.dtype.itemsize

        def size(choice: StorageOption) -> Size | None:
            axes = choice.fsdp_axes
            if axes is None:
                return None
            piece = piece_numel(value.shape, choice.stored, self._mesh, rounded)
            gathered = nbytes * math.prod(self._mesh[a] for a in axes) * piece
            reduced = gathered // value.dtype.itemsize if value.requires_grad else 0
            return axes, GroupSizes(gathered_nbytes=gathered, reduced=reduced)

        return [size(choice) for choice in choices]

    def _reshard_edge(self, block: FsdpGroup, sizes: Sequence[Size | None], producer: int, consumer: int) -> Edge:
        """Return the edge from a parameter class to a kind's `ReshardAfter`; its pairs pay for bandwidth and memory."""
        ways = self._pricer.reshard_options
        pairs: dict[tuple[int, int], Charge] = {}
        for size in dict.fromkeys(sizes):
            for way, reshard_after in enumerate(ways):
                price = Price() if size is None else self._pricer.bandwidth(block, *size, reshard_after)
                pairs[_number(sizes, size), way] = price.charge
        return Edge(
            producer=producer,
            consumer=consumer,
            producer_ports=tuple(_number(sizes, size) for size in sizes),
            consumer_ports=tuple(range(len(ways))),
            pairs=pairs,
        )

    # --- under a decision ----------------------------------------------------------------------------------------

    def reshard_after(self, stored: Sequence[StorageOption], ways: Sequence[int]) -> dict[str, ReshardAfter]:
        """Return kind of block -> when it reshards, for kinds with an FSDP group that do not reshard after the forward.

        Args:
            stored: for each parameter class, its chosen storage option.
            ways: for each kind of block, the index of its chosen reshard option.
        """
        reshard_by_kind = {
            block.kind: self._pricer.reshard_options[way]
            for block, way in zip(self._structure.fsdp_groups, ways, strict=True)
            if any(stored[position].fsdp_axes is not None for position in block.parameter_counts)
        }
        return {
            kind: reshard_after
            for kind, reshard_after in reshard_by_kind.items()
            if reshard_after is not ReshardAfter.FORWARD
        }

    def earlier_reshards(self, reshard_after: ReshardAfter) -> tuple[ReshardAfter, ...]:
        """Return the options of the run that reshard earlier than ``reshard_after``."""
        order = tuple(ReshardAfter)
        return tuple(other for other in self._pricer.reshard_options if order.index(other) < order.index(reshard_after))

    def chosen(self, stored: Sequence[StorageOption], by_kind: Mapping[str, ReshardAfter]) -> Iterator[FsdpGroupChoice]:
        """Yield the FSDP group of each kind of block that has one; ``by_kind`` is as `reshard_after` returns it."""
        for block in self._structure.fsdp_groups:
            sizes = [
                size
                for p in block.parameter_counts
                for size in self._sizes(block, p, stored[p : p + 1])
                if size is not None
            ]
            if sizes:
                whole = GroupSizes(
                    gathered_nbytes=sum(size.gathered_nbytes for _, size in sizes),
                    reduced=sum(size.reduced for _, size in sizes),
                )
                reshard_after = by_kind.get(block.kind, ReshardAfter.FORWARD)
                yield FsdpGroupChoice(block=block, axes=sizes[0][0], sizes=whole, reshard_after=reshard_after)

    def price(self, gather: FsdpGroupChoice) -> Price:
        """Return the price of all-gathers and reductions of all FSDP groups of a kind, with the collectives."""
        block, axes = gather.block, gather.axes
        reduces = bool(gather.sizes.reduced)
        return add_prices([
            self._pricer.gather_latency(block, axes, gather.reshard_after),
            self._pricer.reduce_latency(block, axes, gather.reshard_after) if reduces else FREE,
            self._pricer.bandwidth(block, axes, gather.sizes, gather.reshard_after),
            self._pricer.collectives(block, axes, gather.sizes, gather.reshard_after),
        ])  # fmt: skip

    def _value(self, parameter: ParameterClass) -> Value:
        return self._structure.regions.graph.values[parameter.values[0]]


def _number(sizes: Sequence[Size | None], size: Size | None) -> int:
    """Return the port of all storage options of the same `Size`; None: of those without an FSDP group."""
    return list(dict.fromkeys(sizes)).index(size)
