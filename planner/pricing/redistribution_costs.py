"""What moving tensors costs on one mesh of one cluster: every redistribution is priced once and remembered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cost_model import AxisGroup, ClusterSpec, axes_group, axis_group, moving_time_s
from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.layouts.layout import Layout, MeshSpec
from cost_model.redistribute import Redistribution, RedistributionPlanner
from planner.ilp import problem as quantity
from planner.plan.estimate import Phase
from planner.pricing.overlap import Beside, Overlap, link_of
from planner.strategies.enumerate import Strategy


class Port(NamedTuple):
    """A tensor at a boundary.

    Attributes:
        layout: None where it is plain.
        gradient: layout of its gradient; None where it has none.
        again: whether, gathered at the boundary, it is gathered again for the backward and not kept.
    """

    layout: Layout | None
    gradient: Layout | None
    again: bool = False


def leaving(strategy: Strategy, slot: int) -> Port:
    """Return the port that a region shows to those which read a slot of it."""
    return Port(strategy.forward[slot], strategy.gradient[slot])


def entering(strategy: Strategy, slot: int) -> Port:
    """Return the port at which a region wants what enters it."""
    return Port(strategy.forward[slot], strategy.gradient[slot], slot in strategy.again)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """``count`` equal calls in a step: ``nbytes`` is the full buffer of one, ``time_s`` the seconds of one.

    Of a pipeline stage in as many passes as a step takes as long as (`Run.passes`), which need not be whole.
    """

    kind: CollectiveKind
    axis: str
    phase: Phase
    nbytes: int
    count: float
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a decision adds to a step, and the collectives in it."""

    charge: Mapping[str, float] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()


FREE = Price()


def add_prices(prices: Sequence[Price]) -> Price:
    """Return the sum of ``prices``."""
    if len(prices) == 1:
        return prices[0]
    charge: dict[str, float] = defaultdict(float)
    collectives: list[Collective] = []
    for price in prices:
        for name, amount in price.charge.items():
            charge[name] += amount
        collectives += price.collectives
    return Price(charge=charge, collectives=tuple(collectives))


class Ports:
    """Numbers for ports, so that pairs of them are cheap to look up."""

    def __init__(self) -> None:
        self._numbers: dict[Port, int] = {}
        self._ports: list[Port] = []

    def number(self, port: Port) -> int:
        """Return the number of ``port``."""
        found = self._numbers.get(port)
        if found is None:
            found = self._numbers[port] = len(self._ports)
            self._ports.append(port)
        return found

    def port(self, number: int) -> Port:
        """Return the port of that number."""
        return self._ports[number]

    def agree(self, a: int, b: int) -> bool:
        """Tell whether one key of a plan can say both: of what sends no gradient back it says the layout alone."""
        (layout, gradient, again), (other_layout, other_gradient, other_again) = self._ports[a], self._ports[b]
        either = gradient == other_gradient or gradient is None or other_gradient is None
        return layout == other_layout and again == other_again and either


class Exchange(NamedTuple):
    """A kind of tensor that is redistributed: its full shape, bytes per element, and how often in a step.

    And the products beside it, where they are to hide it.
    """

    shape: tuple[int, ...]
    itemsize: int
    calls: float
    has_backward: bool
    beside: Beside | None = None


class Communication:
    """Prices of communication on ``mesh`` of ``cluster``.

    Attributes:
        ports: numbers for all ports that are asked about.
    """

    def __init__(self, mesh: MeshSpec, cluster: ClusterSpec) -> None:
        self.ports = Ports()
        self._mesh = mesh
        self._cluster = cluster
        self._groups = [axis_group(mesh, name, cluster) for name in mesh.names]
        self._links = [link_of(group) for group in self._groups]
        self._overlap = Overlap.of(cluster.device)
        self._paths = RedistributionPlanner(mesh.shape, self.time_s)
        self._times_s: dict[tuple[CollectiveKind, int, int], float] = {}
        self._moves: dict[tuple[object, ...], Price | None] = {}
        self._exchanged: dict[Exchange, dict[tuple[int, int], Price | None]] = {}

    def time_s(self, kind: CollectiveKind, axis: int, nbytes: int) -> float:
        """Return the seconds of one collective on the axis of that index, the host's work around it included."""
        key = kind, axis, nbytes
        if key not in self._times_s:
            self._times_s[key] = moving_time_s(kind, nbytes, self._groups[axis], self._cluster)
        return self._times_s[key]

    def flat_time_s(self, kind: CollectiveKind, axes: tuple[int, ...], nbytes: int) -> float:
        """Return the seconds of one collective on all of these axes, taken as one."""
        if len(axes) == 1:
            return self.time_s(kind, axes[0], nbytes)
        return moving_time_s(kind, nbytes, self._flat_group(axes), self._cluster)

    def flat_link(self, axes: tuple[int, ...]) -> str:
        """Name the wires that these axes, taken as one, communicate over."""
        return link_of(self._flat_group(axes))

    def _flat_group(self, axes: tuple[int, ...]) -> AxisGroup:
        return axes_group(self._mesh, tuple(self._mesh.names[axis] for axis in axes), self._cluster)

    def path(self, shape: Sequence[int], itemsize: int, source: Layout, target: Layout) -> Redistribution | None:
        """Return the cheapest redistribution, None where there is none."""
        return self._paths.find(shape, itemsize, source, target)

    def collective(
        self, kind: CollectiveKind, axis: int, nbytes: int, phase: Phase, calls: float, prefix: str
    ) -> Price:
        """Return the price of ``calls`` equal collectives; ``prefix`` says what waits for them."""
        time_s = self.time_s(kind, axis, nbytes)
        name = self._mesh.names[axis]
        found = Collective(kind=kind, axis=name, phase=phase, nbytes=nbytes, count=calls, time_s=time_s)
        return Price(charge={prefix + self._links[axis]: calls * time_s}, collectives=(found,))

    def move(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        source: Layout,
        target: Layout,
        *,
        phase: Phase,
        calls: float,
        prefix: str,
    ) -> Price | None:
        """Return the price of ``calls`` redistributions from ``source`` to ``target``; None where there is no path."""
        key = (shape, itemsize, source, target, phase, calls, prefix)
        try:
            return self._moves[key]  # asked for once: layouts take long to hash
        except KeyError:
            path = self.path(shape, itemsize, source, target)
            found = self._moves[key] = None if path is None else self._walk(path, phase, calls, prefix)
        return found

    def _walk(self, path: Redistribution, phase: Phase, calls: float, prefix: str) -> Price:
        if not path.collectives:
            return FREE
        return add_prices(
            [self.collective(s.kind, s.axis, s.nbytes, phase, calls, prefix) for s in path.steps if s.kind != "slice"]
        )

    def exchange(self, exchanged: Exchange, source: int, target: int) -> Price | None:
        """Return the price of redistributing an activation between two ports, forward and backward.

        None where there is no path, where the tensor has a gradient on one side only, or where it should be gathered
        again and is not gathered.
        """
        if source == target:
            return FREE
        known = self._exchanged.setdefault(exchanged, {})
        pair = source, target
        if pair not in known:
            known[pair] = self._exchange(exchanged, self.ports.port(source), self.ports.port(target))
        return known[pair]

    def _exchange(self, exchanged: Exchange, source: Port, target: Port) -> Price | None:
        (source_layout, source_gradient, _), (layout, gradient, again) = source, target
        shape, itemsize, calls, has_backward, beside = exchanged
        if source_layout is None or layout is None:
            return None
        prices = []
        if again:
            gathered = self._gathered_again(exchanged, source_layout, layout)
            if gathered is None:
                return None
            prices.append(gathered)
        forward = self.move(
            shape, itemsize, source_layout, layout, phase="forward", calls=calls, prefix=quantity.BLOCKING_FORWARD
        )
        if forward is not None and beside is not None:
            path = self.path(shape, itemsize, source_layout, layout)
            forward = self.hidden(forward, path, quantity.FORWARD, beside.reading.forward, beside.making.forward)
        if forward is None:
            return None
        prices.append(forward)
        if source_gradient is None or gradient is None or not has_backward:
            return add_prices(prices)
        backward = self.move(
            shape, itemsize, gradient, source_gradient, phase="backward", calls=calls, prefix=quantity.BLOCKING_BACKWARD
        )
        if backward is not None and beside is not None:
            path = self.path(shape, itemsize, gradient, source_gradient)
            # What is gathered again hides behind the product of the input's gradient, this behind what is left.
            reading = beside.reading.backward - (beside.reading.forward if again else 0.0)
            backward = self.hidden(backward, path, quantity.BACKWARD, beside.making.backward, reading)
        return None if backward is None else add_prices([*prices, backward])

    def _gathered_again(self, exchanged: Exchange, source: Layout, layout: Layout) -> Price | None:
        """Return the price of gathering an activation once more in the backward; None where it is not gathered."""
        path = self.path(exchanged.shape, exchanged.itemsize, source, layout)
        if path is None or not path.steps or any(step.kind != "all_gather" for step in path.steps):
            return None
        price = self._walk(path, "backward", exchanged.calls, quantity.BLOCKING_BACKWARD)
        if exchanged.beside is None:
            return price
        return self.hidden(price, path, quantity.BACKWARD, exchanged.beside.reading.forward, 0.0)

    def hidden(
        self,
        price: Price,
        path: Redistribution | None,
        phase: quantity.PhaseQuantities,
        gathered_for_s: float,
        reduced_from_s: float,
    ) -> Price:
        """Return a redistribution's price with what products hide of it; see `planner.pricing.async_tp`.

        Args:
            path: of the redistribution.
            gathered_for_s: seconds of the products that read what an all-gather would bring.
            reduced_from_s: seconds of the product whose result a reduction would sum.
        """
        if path is None or len(path.steps) != 1 or path.steps[0].axis != self._axis_of_pieces or not price.collectives:
            return price
        ((step,), (one,)) = path.steps, price.collectives
        ranks = self._mesh.shape[step.axis]
        hidden_s = {
            "all_gather": min(one.time_s, gathered_for_s),
            "reduce_scatter": min(one.time_s * (1 - 1 / ranks), reduced_from_s),
            "all_reduce": min(one.time_s * (1 - 1 / ranks), reduced_from_s),
        }.get(one.kind, 0.0)
        return self.beside(price, phase, hidden_s)

    def beside(self, price: Price, phase: quantity.PhaseQuantities, hidden_s: float) -> Price:
        """Return the price of one kind of collective that blocked, of each call of which compute hides ``hidden_s``."""
        if not hidden_s:
            return price
        ((one,), (name,)) = price.collectives, price.charge
        link, hidden_s = name.removeprefix(phase.blocking), hidden_s * one.count
        charge = {
            name: one.count * one.time_s - hidden_s,
            phase.prefetch + link: hidden_s,
            phase.slowdown: self._overlap.slowdown_s(hidden_s),
        }
        return Price(charge=charge, collectives=price.collectives)

    @property
    def _axis_of_pieces(self) -> int | None:
        """The mesh axis on which communication is cut into pieces: the innermost, where that is inside a node."""
        inner = max((axis for axis, size in enumerate(self._mesh.shape) if size > 1), default=None)
        return inner if inner is not None and self._groups[inner].nodes == 1 else None
