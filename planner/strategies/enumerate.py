"""Every way to run a region: on one axis by search, on several as the product of one-axis strategies."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cost_model.layouts.layout import Layout, divides
from planner.graph.op_graph import Op, Value
from planner.regions.module_bodies import OUTSIDE
from planner.regions.regions import Region, RegionOp, find_op_inputs
from planner.strategies.dtensor_rules import DTensorRules, WholeOutputs, quiet_dtensor
from planner.strategies.own_rules import may_join, may_run, own_rules, uncommon_placements

R = Replicate()
P = Partial()

Placements = tuple[Placement | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisStrategy:
    """A region on one axis: the placement of each slot (None: plain) and of its gradient (None: it has none)."""

    forward: Placements
    gradient: Placements


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A region on the whole mesh.

    Attributes:
        forward: the layout of each slot; None: plain.
        gradient: of its gradient; None: it has none.
        reallgathered: slots whose tensor, gathered for the region, is not kept for the backward but gathered again.
    """

    forward: tuple[Layout | None, ...]
    gradient: tuple[Layout | None, ...]
    reallgathered: tuple[int, ...] = ()


def gradient_options(placement: Placement) -> tuple[Placement, ...]:
    """Return in which placements the gradient of a boundary tensor may be, given the tensor's own."""
    if type(placement) is Replicate:
        return (R, P)
    if type(placement) in (Shard, _StridedShard):
        return (placement,)
    return (R,) if type(placement) is Partial and placement.reduce_op == "sum" else ()


def canonical_size(size: int) -> int:
    """Return the axis size to ask DTensor's rules about: they only look at divisibility, so 2 stands for 4, 8, ..."""
    return 2 if size & (size - 1) == 0 else size


class AxisRules:
    """Forward and backward of one op on one axis: our rules first, DTensor's where we have none."""

    def __init__(self, rules: DTensorRules) -> None:
        self._rules = rules

    def forward(self, op: Op, inputs: Sequence[Value], placements: Placements) -> tuple[Placement, ...] | None:
        """Return the placements of what an op makes of inputs so placed (None: plain); None where it does not run."""
        own = own_rules(op, inputs)
        if own is not None:
            return next(((rule.output,) for rule in own if rule.inputs == placements), None)
        if not may_run(op, placements):
            return None
        layouts = self._rules.forward(op, inputs, tuple(None if p is None else (p,) for p in placements))
        return None if layouts is None else tuple(layout[0] for layout in layouts if layout is not None)

    def backward(
        self, op: Op, inputs: Sequence[Value], placements: Placements, gradients: Placements
    ) -> Placements | None:
        """Return the placements of its inputs' gradients, given those of its outputs'; None where it does not run."""
        own = own_rules(op, inputs)
        if own is not None:
            return next(
                (
                    rule.input_gradients
                    for rule in own
                    if rule.inputs == placements and (rule.output_gradient,) == gradients
                ),
                None,
            )
        layouts = self._rules.backward(
            op,
            inputs,
            tuple(None if p is None else (p,) for p in placements),
            tuple(None if g is None else (g,) for g in gradients),
        )
        return None if layouts is None else tuple(None if layout is None else layout[0] for layout in layouts)


def _passes_on(placement: Placement) -> bool:
    """Tell whether an op may hand a tensor so placed to the next one.

    Averages over ranks are no layout that a redistribution here starts from. Strided shards (what a view that merges a
    split dim leaves) carry more than their placement says, so that asking op by op would not show what DTensor does.
    """
    if isinstance(placement, _StridedShard):
        return False
    return not placement.is_partial() or getattr(placement, "reduce_op", "sum") == "sum"


class _RegionSearch:
    """Depth-first search over the placements of one region on one axis."""

    def __init__(self, region: Region, rules: AxisRules, axis_size: int) -> None:
        self._region = region
        self._rules = rules
        self._size = axis_size
        self._exits = set(region.exits)

    def run(self) -> Iterator[AxisStrategy]:
        for forward in self._forward({}, 0):
            for gradient in self._backward(forward):
                yield AxisStrategy(
                    forward=tuple(forward.get(i) for i in range(len(self._region.slots))),
                    gradient=tuple(gradient.get(i) for i in range(len(self._region.slots))),
                )

    def _options(self, position: int) -> Iterator[Placement | None]:
        slot = self._region.slots[position]
        if slot.origin == "plain":
            yield None
            return
        yield R
        for dim in range(len(slot.value.shape)):
            if slot.value.shape[dim] % self._size == 0 and slot.value.shape[dim] >= self._size:
                yield Shard(dim)
        if slot.origin == "entry" and slot.value.requires_grad and self._region.call != OUTSIDE:
            yield P

    def _uncommon(self, region_op: RegionOp, position: int) -> Iterator[Placement]:
        slot = self._region.slots[position]
        if slot.origin == "parameter" and self._region.call != OUTSIDE:
            for placement in uncommon_placements(region_op.op, region_op.inputs.index(position)):
                if divides(slot.value.shape, (placement,), (self._size,)):
                    yield placement

    def _forward(self, known: dict[int, Placement | None], step: int) -> Iterator[dict[int, Placement | None]]:
        if step == len(self._region.ops):
            free = [i for i, slot in enumerate(self._region.slots) if slot.origin != "op" and i not in known]
            for choice in itertools.product(*(list(self._options(i)) for i in free)):
                yield known | dict(zip(free, choice, strict=True))
            return
        region_op = self._region.ops[step]
        inputs = find_op_inputs(self._region, region_op)
        unknown = list(dict.fromkeys(i for i in region_op.inputs if i not in known))
        options = [[*self._options(i), *self._uncommon(region_op, i)] for i in unknown]
        for choice in itertools.product(*options):
            state = known | dict(zip(unknown, choice, strict=True))
            outputs = self._rules.forward(region_op.op, inputs, tuple(state[i] for i in region_op.inputs))
            if outputs is None or not all(map(_passes_on, outputs)):
                continue
            yield from self._forward(state | dict(zip(region_op.outputs, outputs, strict=True)), step + 1)

    def _backward(self, forward: dict[int, Placement | None]) -> Iterator[dict[int, Placement | None]]:
        yield from self._reverse(forward, {}, len(self._region.ops) - 1)

    def _reverse(
        self, forward: dict[int, Placement | None], gradient: dict[int, Placement | None], step: int
    ) -> Iterator[dict[int, Placement | None]]:
        if step < 0:
            yield from self._finish(forward, gradient)
            return
        region_op = self._region.ops[step]
        open_exits = [
            i
            for i in region_op.outputs
            if i in self._exits and self._region.slots[i].value.requires_grad and gradient.get(i) is None
        ]
        for choice in itertools.product(*(gradient_options(forward[i]) for i in open_exits)):  # type: ignore[arg-type]
            state = gradient | dict(zip(open_exits, choice, strict=True))
            if any(not self._exit_ok(i, forward, state) for i in region_op.outputs):
                continue
            after = self._through(region_op, forward, state)
            if after is not None:
                yield from self._reverse(forward, after, step - 1)

    def _exit_ok(
        self, position: int, forward: dict[int, Placement | None], gradient: dict[int, Placement | None]
    ) -> bool:
        found, placement = gradient.get(position), forward[position]
        if position not in self._exits or found is None:
            return True
        return placement is not None and found in gradient_options(placement)

    def _through(
        self, region_op: RegionOp, forward: dict[int, Placement | None], gradient: dict[int, Placement | None]
    ) -> dict[int, Placement | None] | None:
        arriving = tuple(gradient.get(i) for i in region_op.outputs)
        if all(g is None for g in arriving):
            return gradient
        inputs = find_op_inputs(self._region, region_op)
        found = self._rules.backward(region_op.op, inputs, tuple(forward[i] for i in region_op.inputs), arriving)
        if found is None:
            return None
        state = dict(gradient)
        for position, placement in zip(region_op.inputs, found, strict=True):
            if placement is None or not self._region.slots[position].value.requires_grad:
                continue
            if state.get(position, placement) != placement:
                return None  # two uses give gradients in different placements, and autograd cannot add those
            state[position] = placement
        return state

    def _finish(
        self, forward: dict[int, Placement | None], gradient: dict[int, Placement | None]
    ) -> Iterator[dict[int, Placement | None]]:
        boundary = [
            i
            for i, slot in enumerate(self._region.slots)
            if slot.origin in ("entry", "parameter") and slot.value.requires_grad
        ]
        open_slots = [
            i for i in boundary if gradient.get(i) is None and (i in self._exits or self._region.call == OUTSIDE)
        ]
        for choice in itertools.product(*(gradient_options(forward[i]) for i in open_slots)):  # type: ignore[arg-type]
            state = gradient | dict(zip(open_slots, choice, strict=True))
            if self._region.call == OUTSIDE and any(g.is_partial() for g in choice):
                continue
            if all(self._boundary_ok(forward[i], state.get(i)) for i in boundary):
                yield state

    @staticmethod
    def _boundary_ok(placement: Placement | None, gradient: Placement | None) -> bool:
        return gradient is None or (placement is not None and gradient in gradient_options(placement))


def splitting_batch(
    region: Region, strategies: Sequence[AxisStrategy], shapes: Sequence[tuple[int, ...]], size: int
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that compute with whole parameters, and with activations split over the batch alone.

    All of a region's activations are split that can be; of a batch that the axis does not divide none is.

    Args:
        shapes: of the slots, at the batch at hand.
        size: ranks of the axis.
    """

    def splits(strategy: AxisStrategy) -> frozenset[int] | None:
        found = set[int]()
        for position, (slot, placement) in enumerate(zip(region.slots, strategy.forward, strict=True)):
            if slot.origin not in ("entry", "parameter") or placement in (None, R):
                continue
            if slot.origin == "parameter" or placement != Shard(0) or shapes[position][0] % size:
                return None
            found.add(position)
        return frozenset(found)

    split = [(strategy, found) for strategy in strategies if (found := splits(strategy)) is not None]
    most = frozenset().union(*(found for _, found in split))
    return tuple(strategy for strategy, found in split if found == most) or tuple(s for s, _ in split)


class StrategyTable:
    """The strategies of every region, remembered by the region's signature."""

    def __init__(self) -> None:
        self._rules: dict[tuple[int, ...], DTensorRules] = {}
        self._outputs = WholeOutputs()
        self._axis: dict[tuple[Hashable, int], tuple[AxisStrategy, ...]] = {}
        self._mesh: dict[Hashable, tuple[Strategy, ...]] = {}
        self._verified: dict[tuple[Hashable, tuple[int, ...], Strategy], bool] = {}

    def _rules_on(self, mesh_shape: tuple[int, ...]) -> DTensorRules:
        if mesh_shape not in self._rules:
            self._rules[mesh_shape] = DTensorRules(mesh_shape, self._outputs)
        return self._rules[mesh_shape]

    def axis_rules(self, axis_size: int) -> AxisRules:
        """Return how single ops run on one axis of ``axis_size`` ranks."""
        return AxisRules(self._rules_on((canonical_size(axis_size),)))

    def on_axis(self, region: Region, axis_size: int) -> tuple[AxisStrategy, ...]:
        """Return the strategies of ``region`` on one axis of ``axis_size`` ranks."""
        size = canonical_size(axis_size)
        key = ((region.signature, region.exits), size)
        if key not in self._axis:
            search = _RegionSearch(region, self.axis_rules(size), size)
            with quiet_dtensor():
                self._axis[key] = tuple(dict.fromkeys(search.run()))
        return self._axis[key]

    def on_mesh(
        self,
        region: Region,
        mesh_shape: Sequence[int],
        base: Region | None = None,
        batch_axes: Sequence[int] = (),
    ) -> tuple[Strategy, ...]:
        """Return the strategies of ``region`` on a mesh: one per axis, all splits even; axes of size one replicate.

        Args:
            base: the same region as traced at another batch, to look the strategies up by; None: ``region`` itself.
            batch_axes: axes that split the batch alone.
        """
        base = base or region
        shapes = tuple(slot.value.shape for slot in region.slots)
        key = ((base.signature, base.exits), tuple(mesh_shape), shapes, tuple(batch_axes))
        if key not in self._mesh:
            self._mesh[key] = self._joined(base, shapes, mesh_shape, batch_axes)
        return self._mesh[key]

    def _joined(
        self, base: Region, shapes: Sequence[tuple[int, ...]], mesh_shape: Sequence[int], batch_axes: Sequence[int]
    ) -> tuple[Strategy, ...]:
        per_axis = [self.on_axis(base, size) if size > 1 else self._replicated(base) for size in mesh_shape]
        for axis in batch_axes:
            per_axis[axis] = splitting_batch(base, per_axis[axis], shapes, mesh_shape[axis])
        found = []
        for combination in itertools.product(*per_axis):
            forward = tuple(_join([axis.forward[i] for axis in combination]) for i in range(len(shapes)))
            gradient = tuple(_join([axis.gradient[i] for axis in combination]) for i in range(len(shapes)))
            if all(
                layout is None or divides(shape, layout, mesh_shape)
                for shape, layout in zip(shapes, forward, strict=True)
            ) and all(may_join(r.op, [forward[i] for i in r.inputs]) for r in base.ops):
                found.append(Strategy(forward=forward, gradient=gradient))
        return tuple(found)

    def _replicated(self, region: Region) -> tuple[AxisStrategy, ...]:
        """Return the strategy of an axis of one rank, alone; nothing where DTensor does not run the region at all."""
        whole = (
            s
            for s in self.on_axis(region, 2)
            if all(p is None or p == R for p in s.forward) and all(g in (None, R) for g in s.gradient)
        )
        return tuple(itertools.islice(whole, 1))

    def runs(self, region: Region, strategy: Strategy, mesh_shape: Sequence[int]) -> bool:
        """Tell whether DTensor, asked on the whole mesh, runs the region as the product of its one-axis strategies."""
        shape = tuple(canonical_size(size) if size > 1 else 1 for size in mesh_shape)
        key = ((region.signature, region.exits), shape, strategy)
        if key not in self._verified:
            with quiet_dtensor():
                self._verified[key] = self._replay(region, strategy, shape)
        return self._verified[key]

    def _replay(self, region: Region, strategy: Strategy, shape: tuple[int, ...]) -> bool:
        if sum(size > 1 for size in shape) <= 1 or not region.ops:
            return True
        rules = self._rules_on(shape)
        forward: dict[int, Layout | None] = {
            i: strategy.forward[i] for i, slot in enumerate(region.slots) if slot.origin != "op"
        }
        for region_op in region.ops:
            inputs = find_op_inputs(region, region_op)
            if own_rules(region_op.op, inputs) is not None:
                outputs: tuple[Layout | None, ...] | None = tuple(strategy.forward[i] for i in region_op.outputs)
            else:
                outputs = rules.forward(region_op.op, inputs, tuple(forward[i] for i in region_op.inputs))
            if outputs is None:
                return False
            forward.update(zip(region_op.outputs, outputs, strict=True))
        return all(forward[i] == strategy.forward[i] for i in region.exits) and self._replay_backward(
            region, strategy, forward, rules
        )

    def _replay_backward(
        self, region: Region, strategy: Strategy, forward: dict[int, Layout | None], rules: DTensorRules
    ) -> bool:
        gradient: dict[int, Layout | None] = {i: strategy.gradient[i] for i in region.exits}
        for region_op in reversed(region.ops):
            arriving = tuple(gradient.get(i) for i in region_op.outputs)
            if all(g is None for g in arriving):
                continue
            inputs = find_op_inputs(region, region_op)
            if own_rules(region_op.op, inputs) is not None:
                found: tuple[Layout | None, ...] | None = tuple(strategy.gradient[i] for i in region_op.inputs)
            else:
                found = rules.backward(region_op.op, inputs, tuple(forward[i] for i in region_op.inputs), arriving)
            if found is None:
                return False
            for position, layout in zip(region_op.inputs, found, strict=True):
                if layout is not None and gradient.setdefault(position, layout) != layout:
                    return False
        ports = [
            i
            for i, slot in enumerate(region.slots)
            if slot.origin in ("entry", "parameter") and slot.value.requires_grad
        ]
        return all(gradient.get(i) == strategy.gradient[i] for i in ports)


def _join(placements: Sequence[Placement | None]) -> Layout | None:
    if any(placement is None for placement in placements):
        return None
    return tuple(placement for placement in placements if placement is not None)
