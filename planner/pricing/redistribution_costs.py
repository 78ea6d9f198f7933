"""Prices of redistributions: `RedistributionPricer.both_ways` for an activation, `one_way` for any tensor.

A redistribution runs the cheapest path of collectives from one layout to another
(`cost_model.redistribute.RedistributionPlanner`). Each collective is priced by the cost model of collectives
(`cost_model.dispatched_collective_time_s`) on the ranks of its mesh axis. The consumer waits for the collective, so the
seconds are blocking. Async tensor parallelism overlaps a part of the seconds (`planner.pricing.async_tp` states the
rule).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cost_model import AxisGroup, ClusterSpec, axes_group, axis_group, dispatched_collective_time_s
from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.layouts.layout import Layout, MeshSpec
from cost_model.layouts.uneven import Rounded
from cost_model.redistribute import Redistribution, RedistributionPlanner
from planner.ilp.quantities import BACKWARD, FORWARD, LinkQuantities, PhaseQuantities
from planner.plan.estimate import Phase
from planner.pricing.overlap import AdjacentGemms, Overlap, link_of
from planner.pricing.port_layouts import PortLayouts, PortNumbers
from planner.pricing.price import FREE, Collective, Price, add_prices


class RedistributedTensor(NamedTuple):
    """An activation that is redistributed.

    Attributes:
        shape: global shape.
        itemsize: bytes per element.
        calls: redistributions per step.
        has_backward: whether the gradient is redistributed as well.
        adjacent_gemms: the GEMMs that the communication overlaps with in async tensor parallelism; None: all of the
            communication is blocking.
    """

    shape: tuple[int, ...]
    itemsize: int
    calls: float
    has_backward: bool
    adjacent_gemms: AdjacentGemms | None = None


class RedistributionPricer:
    """Prices of collectives and redistributions on one mesh of one cluster; each price is computed once.

    Attributes:
        ports: numbers of the ports between which tensors are redistributed.
        rounded: lengths of dims that are rounded up (`OpGraph.rounded`).
    """

    def __init__(self, mesh: MeshSpec, cluster: ClusterSpec, rounded: Rounded | None = None) -> None:
        self.ports = PortNumbers()
        self.rounded: Rounded = rounded or {}
        self._mesh = mesh
        self._cluster = cluster
        self._groups = [axis_group(mesh, name, cluster) for name in mesh.names]
        self._links = [link_of(group) for group in self._groups]
        self._overlap = Overlap.of(cluster.device)
        self._paths = RedistributionPlanner(mesh.shape, self.time_s, rounded)
        self._times_s: dict[tuple[CollectiveKind, int, int], float] = {}
        self._one_way: dict[tuple[object, ...], Price | None] = {}
        self._both_ways: dict[RedistributedTensor, dict[tuple[int, int], Price | None]] = {}

    # --- collectives ---------------------------------------------------------------------------------------------

    def time_s(self, kind: CollectiveKind, axis: int, nbytes: int) -> float:
        """Return the seconds of one collective on the mesh axis of index ``axis``, including the host's work.

        Args:
            nbytes: bytes of the full buffer.
        """
        key = kind, axis, nbytes
        if key not in self._times_s:
            self._times_s[key] = dispatched_collective_time_s(kind, nbytes, self._groups[axis], self._cluster)
        return self._times_s[key]

    def flat_time_s(self, kind: CollectiveKind, axes: tuple[int, ...], nbytes: int) -> float:
        """Return the seconds of one collective on several mesh axes that are flattened into one."""
        if len(axes) == 1:
            return self.time_s(kind, axes[0], nbytes)
        return dispatched_collective_time_s(kind, nbytes, self._flat_group(axes), self._cluster)

    def flat_link(self, axes: tuple[int, ...]) -> str:
        """Return the name of the link that these axes, flattened into one, communicate over."""
        return link_of(self._flat_group(axes))

    def _flat_group(self, axes: tuple[int, ...]) -> AxisGroup:
        return axes_group(self._mesh, tuple(self._mesh.names[axis] for axis in axes), self._cluster)

    def collective(
        self, kind: CollectiveKind, axis: int, nbytes: int, phase: Phase, calls: float, quantities: LinkQuantities
    ) -> Price:
        """Return the price of ``calls`` equal collectives on the mesh axis of index ``axis``.

        Args:
            nbytes: bytes of the full buffer of one call.
            quantities: link -> quantity that the seconds are charged to.
        """
        time_s = self.time_s(kind, axis, nbytes)
        name = self._mesh.names[axis]
        collective = Collective(kind=kind, axis=name, phase=phase, nbytes=nbytes, count=calls, time_s=time_s)
        return Price(charge={quantities[self._links[axis]]: calls * time_s}, collectives=(collective,))

    # --- redistributions -----------------------------------------------------------------------------------------

    def path(self, shape: Sequence[int], itemsize: int, source: Layout, target: Layout) -> Redistribution | None:
        """Return the cheapest redistribution from ``source`` to ``target``; None where there is none."""
        return self._paths.find(shape, itemsize, source, target)

    def one_way(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        source: Layout,
        target: Layout,
        *,
        phase: Phase,
        calls: float,
        quantities: LinkQuantities,
    ) -> Price | None:
        """Return the price of ``calls`` redistributions in one phase; None where there is no path.

        Args:
            shape: global shape of the tensor.
            itemsize: bytes per element.
            quantities: link -> quantity that the seconds are charged to.
        """
        key = (shape, itemsize, source, target, phase, calls, quantities)
        try:
            return self._one_way[key]  # one look-up: layouts take long to hash
        except KeyError:
            path = self.path(shape, itemsize, source, target)
            price = self._one_way[key] = None if path is None else self._price_of_path(path, phase, calls, quantities)
        return price

    def _price_of_path(self, path: Redistribution, phase: Phase, calls: float, quantities: LinkQuantities) -> Price:
        if not path.collectives:
            return FREE
        return add_prices([
            self.collective(step.kind, step.axis, step.nbytes, phase, calls, quantities)
            for step in path.steps
            if step.kind != "slice"
        ])  # fmt: skip

    def both_ways(self, tensor: RedistributedTensor, source: int, target: int) -> Price | None:
        """Return the price of redistributing an activation in the forward and its gradient in the backward.

        None if one of the two redistributions has no path, or if one of two different ports has no layout. None as well
        if the target port asks for a re-all-gather, but the forward redistribution has a step that is no all-gather.

        Args:
            source, target: numbers of the producer's and the consumer's port (`ports`).
        """
        if source == target:
            return FREE
        prices = self._both_ways.setdefault(tensor, {})
        pair = source, target
        if pair not in prices:
            prices[pair] = self._price_of_pair(tensor, self.ports.port(source), self.ports.port(target))
        return prices[pair]

    def _price_of_pair(self, tensor: RedistributedTensor, source: PortLayouts, target: PortLayouts) -> Price | None:
        if source.layout is None or target.layout is None:
            return None
        prices = []
        if target.reallgather:
            reallgather = self._reallgather(tensor, source.layout, target.layout)
            if reallgather is None:
                return None
            prices.append(reallgather)
        forward = self._forward(tensor, source.layout, target.layout)
        if forward is None:
            return None
        prices.append(forward)
        if source.gradient is None or target.gradient is None or not tensor.has_backward:
            return add_prices(prices)
        backward = self._backward(tensor, target.gradient, source.gradient, reallgather=target.reallgather)
        return None if backward is None else add_prices([*prices, backward])

    def _forward(self, tensor: RedistributedTensor, source: Layout, target: Layout) -> Price | None:
        shape, itemsize, calls, _, gemms = tensor
        price = self.one_way(shape, itemsize, source, target, phase="forward", calls=calls, quantities=FORWARD.blocking)
        if price is None or gemms is None:
            return price
        path = self.path(shape, itemsize, source, target)
        return self.overlap_with_gemms(price, path, FORWARD, gemms.consumers.forward, gemms.producer.forward)

    def _backward(
        self, tensor: RedistributedTensor, source: Layout, target: Layout, *, reallgather: bool
    ) -> Price | None:
        """Return the price of redistributing the gradient from the consumer's layout to the producer's."""
        shape, itemsize, calls, _, gemms = tensor
        price = self.one_way(
            shape, itemsize, source, target, phase="backward", calls=calls, quantities=BACKWARD.blocking
        )
        if price is None or gemms is None:
            return price
        path = self.path(shape, itemsize, source, target)
        # A re-all-gather overlaps with the GEMM of the input's gradient, which takes as long as the forward's GEMM. The
        # gradient's redistribution then overlaps with the other GEMM only, which computes the weight's gradient.
        consumers_s = gemms.consumers.backward - (gemms.consumers.forward if reallgather else 0.0)
        return self.overlap_with_gemms(price, path, BACKWARD, gemms.producer.backward, consumers_s)

    def _reallgather(self, tensor: RedistributedTensor, source: Layout, target: Layout) -> Price | None:
        """Return the price of all-gathering an activation again in the backward; None if its path has other steps."""
        path = self.path(tensor.shape, tensor.itemsize, source, target)
        if path is None or not path.steps or any(step.kind != "all_gather" for step in path.steps):
            return None
        price = self._price_of_path(path, "backward", tensor.calls, BACKWARD.blocking)
        if tensor.adjacent_gemms is None:
            return price
        return self.overlap_with_gemms(price, path, BACKWARD, tensor.adjacent_gemms.consumers.forward, 0.0)

    # --- overlap -------------------------------------------------------------------------------------------------

    def overlap_with_gemms(
        self,
        price: Price,
        path: Redistribution | None,
        phase: PhaseQuantities,
        after_s: float,
        before_s: float,
    ) -> Price:
        """Return a redistribution's price with a part overlapped with GEMMs (`planner.pricing.async_tp` has the rule).

        Args:
            price: the price with all seconds blocking.
            path: the redistribution.
            phase: quantities of the phase that runs the redistribution.
            after_s: seconds of the GEMMs that read the result of an all-gather.
            before_s: seconds of the GEMM whose partial result a reduction sums.
        """
        if path is None or len(path.steps) != 1 or path.steps[0].axis != self._axis_in_pieces or not price.collectives:
            return price
        ((step,), (collective,)) = path.steps, price.collectives
        ranks = self._mesh.shape[step.axis]
        overlapped_s = {
            "all_gather": min(collective.time_s, after_s),
            "reduce_scatter": min(collective.time_s * (1 - 1 / ranks), before_s),
            "all_reduce": min(collective.time_s * (1 - 1 / ranks), before_s),
        }.get(collective.kind, 0.0)
        return self.overlap(price, phase, overlapped_s)

    def overlap(self, price: Price, phase: PhaseQuantities, overlapped_s: float) -> Price:
        """Return ``price``, of one kind of blocking collective, with ``overlapped_s`` seconds per call overlapped."""
        if not overlapped_s:
            return price
        ((collective,), (blocking,)) = price.collectives, price.charge
        assert blocking.link is not None
        overlapped_s *= collective.count
        charge = {
            blocking: collective.count * collective.time_s - overlapped_s,
            phase.prefetch[blocking.link]: overlapped_s,
            phase.slowdown: self._overlap.slowdown_s(overlapped_s),
        }
        return Price(charge=charge, collectives=price.collectives)

    @property
    def _axis_in_pieces(self) -> int | None:
        """Index of the axis whose collectives are cut into pieces: the innermost, if inside a node; None otherwise."""
        inner = max((axis for axis, size in enumerate(self._mesh.shape) if size > 1), default=None)
        return inner if inner is not None and self._groups[inner].nodes == 1 else None
