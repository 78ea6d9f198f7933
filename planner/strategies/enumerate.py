"""`StrategyTable`: the strategies of every region on a mesh, as the product of its strategies on each axis.

DTensor's behaviour on a mesh is not always the product of its behaviour on the axes. `StrategyTable.runs` verifies a
strategy on the whole mesh. The search only verifies strategies that it is about to choose.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout, divides
from cost_model.layouts.uneven import Rounded, shards_once
from planner.regions.regions import Region, find_op_inputs
from planner.strategies.axis_strategies import AxisRules, AxisStrategy, batch_only_strategies, find_axis_strategies
from planner.strategies.dtensor_rules import DTensorRules, GlobalOutputs, quiet_dtensor
from planner.strategies.local_ops import samples_divide
from planner.strategies.matmul_rules import local_linear_gradients, local_linear_outputs
from planner.strategies.own_rules import axis_rules_combine, own_rules

R = Replicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way to run a region on the whole mesh.

    Attributes:
        forward: layout of each slot; None for a plain tensor.
        gradient: layout of each slot's gradient; None where there is none.
        reallgathered: slots whose all-gathered tensor is not saved for backward, but all-gathered again.
    """

    forward: tuple[Layout | None, ...]
    gradient: tuple[Layout | None, ...]
    reallgathered: tuple[int, ...] = ()


_MOST_PRICED_OPS = 20_000
"""Ops of a region times its strategies on two axes, beyond which only its `_most_sharded` strategies are kept."""


def _most_sharded(region: Region, strategies: Sequence[AxisStrategy]) -> tuple[AxisStrategy, ...]:
    """Return the strategies without those that leave an input replicated which another, with equal results, shards.

    To shard a replicated tensor takes no communication. A module that loops over time has thousands of ops, each of
    which is priced in every strategy; if five of its inputs may each be replicated or sharded, there are 32 of them.
    The replicated strategy stays: it is that of an axis of one rank, and of a batch that an axis does not divide.
    """
    free = [i for i, slot in enumerate(region.slots) if slot.origin == "entry"]
    by_rest: dict[Hashable, list[AxisStrategy]] = defaultdict(list)
    for strategy in strategies:
        outer = [i for i, slot in enumerate(region.slots) if slot.origin not in ("entry", "op")]
        rest = [strategy.forward[i] for i in (*outer, *region.exits)]
        by_rest[tuple(rest), tuple(strategy.gradient[i] for i in region.exits)].append(strategy)

    def shards_more(other: AxisStrategy, strategy: AxisStrategy) -> bool:
        pairs = [(other.forward[i], strategy.forward[i]) for i in free]
        return any(a != b for a, b in pairs) and all(a == b or (b == R and isinstance(a, Shard)) for a, b in pairs)

    dropped = {
        strategy
        for alike in by_rest.values()
        for strategy in alike
        if any(isinstance(placement, Shard) for placement in strategy.forward)
        and any(shards_more(other, strategy) for other in alike)
    }
    return tuple(strategy for strategy in strategies if strategy not in dropped)


_MOST_COMBINED_OPS = 300_000
"""Ops of a region times its strategies on a mesh, beyond which only its `_most_uniform` strategies are combined."""


def _most_uniform(region: Region, strategies: Sequence[AxisStrategy], most: int) -> tuple[AxisStrategy, ...]:
    """Return at most ``most`` strategies: the replicated, then those that treat tensors of one shape alike.

    Of those that do so equally, the more sharded ones are first.

    A graph network reads one list of edges in each layer. Its layers are then one region, whose strategies are the
    combinations of those of the layers.
    """
    shapes = [(slot.value.shape, slot.origin == "parameter") for slot in region.slots]

    def rank(strategy: AxisStrategy) -> tuple[bool, int, int]:
        placed = set(zip(shapes, strategy.forward, strategy.gradient, strict=True))
        sharded = sum(isinstance(placement, Shard) for placement in strategy.forward)
        return sharded > 0, len(placed), -sharded

    return tuple(sorted(strategies, key=rank)[:most])


def canonical_size(size: int) -> int:
    """Return the size to ask DTensor about: its rules depend on divisibility only, so 2 stands for 4, 8, ..."""
    return 2 if size & (size - 1) == 0 else size


class StrategyTable:
    """The strategies of regions, enumerated once for each signature of a region.

    Args:
        rounded: lengths of dims that are rounded up (`OpGraph.rounded`).
    """

    def __init__(self, rounded: Rounded | None = None) -> None:
        self._rounded: Rounded = rounded or {}
        self._rules: dict[tuple[tuple[int, ...], bool], DTensorRules] = {}
        self._outputs = GlobalOutputs()
        self._axis: dict[tuple[Hashable, int], tuple[AxisStrategy, ...]] = {}
        self._mesh: dict[Hashable, tuple[Strategy, ...]] = {}
        self._verified: dict[tuple[Hashable, tuple[int, ...], Strategy], bool] = {}

    def _rules_on(self, mesh_shape: tuple[int, ...], *, real_shapes: bool = False) -> DTensorRules:
        key = mesh_shape, real_shapes
        if key not in self._rules:
            self._rules[key] = DTensorRules(mesh_shape, self._outputs, real_shapes=real_shapes)
        return self._rules[key]

    def axis_rules(self, axis_size: int) -> AxisRules:
        """Return the rules of single ops on one axis of ``axis_size`` ranks."""
        return AxisRules(self._rules_on((canonical_size(axis_size),)))

    def on_axis(self, region: Region, axis_size: int) -> tuple[AxisStrategy, ...]:
        """Return the strategies of ``region`` on one axis of ``axis_size`` ranks."""
        size = canonical_size(axis_size)
        key = ((region.signature, region.exits), size)
        if key not in self._axis:
            with quiet_dtensor():
                found = tuple(dict.fromkeys(find_axis_strategies(region, self.axis_rules(size), size)))
            is_large = len(region.ops) * len(found) ** 2 > _MOST_PRICED_OPS
            self._axis[key] = _most_sharded(region, found) if is_large else found
        return self._axis[key]

    def on_mesh(
        self,
        region: Region,
        mesh_shape: Sequence[int],
        base: Region | None = None,
        batch_axes: Sequence[int] = (),
    ) -> tuple[Strategy, ...]:
        """Return the strategies of ``region`` on a mesh: all combinations of one strategy per axis with even shards.

        Args:
            base: the same region at the batch size at which strategies on axes are enumerated
                (`planner.graph.trace_module.BASE_BATCH`); None: ``region`` itself.
            batch_axes: indices of axes that split the batch only.
        """
        base = base or region
        shapes = tuple(slot.value.shape for slot in region.slots)
        key = ((base.signature, base.exits), tuple(mesh_shape), shapes, tuple(batch_axes))
        if key not in self._mesh:
            self._mesh[key] = self._product(base, shapes, mesh_shape, batch_axes)
        return self._mesh[key]

    def _product(
        self, base: Region, shapes: Sequence[tuple[int, ...]], mesh_shape: Sequence[int], batch_axes: Sequence[int]
    ) -> tuple[Strategy, ...]:
        per_axis = [self.on_axis(base, size) if size > 1 else self._replicated(base) for size in mesh_shape]
        for axis in batch_axes:
            per_axis[axis] = batch_only_strategies(base, per_axis[axis], shapes, mesh_shape[axis])
        most = _MOST_COMBINED_OPS // max(len(base.ops), 1)
        if math.prod(map(len, per_axis)) > most:
            each = max(int(most ** (1 / len(per_axis))), 1)
            per_axis = [_most_uniform(base, found, each) for found in per_axis]
        strategies = []
        for combination in itertools.product(*per_axis):
            forward = tuple(_layout([axis.forward[i] for axis in combination]) for i in range(len(shapes)))
            gradient = tuple(_layout([axis.gradient[i] for axis in combination]) for i in range(len(shapes)))
            if all(
                layout is None or (divides(shape, layout, mesh_shape) and shards_once(shape, layout, self._rounded))
                for shape, layout in zip(shapes, forward, strict=True)
            ) and all(
                axis_rules_combine(o.op, [forward[i] for i in o.inputs])
                and samples_divide(o.op, [shapes[i] for i in o.inputs], [forward[i] for i in o.inputs], mesh_shape)
                for o in base.ops
            ):
                strategies.append(Strategy(forward=forward, gradient=gradient))
        return tuple(strategies)

    def _replicated(self, region: Region) -> tuple[AxisStrategy, ...]:
        """Return the replicated strategy, the only strategy on an axis of one rank; () if DTensor has none."""
        replicated = (
            strategy
            for strategy in self.on_axis(region, 2)
            if all(placement is None or placement == R for placement in strategy.forward)
            and all(placement in (None, R) for placement in strategy.gradient)
        )
        return tuple(itertools.islice(replicated, 1))

    def runs_replicated(self, region: Region) -> bool:
        """Return whether ``region`` runs on replicated tensors, as it has to on a mesh of one device."""
        return bool(self._replicated(region))

    # --- verification on the whole mesh --------------------------------------------------------------------------

    def runs(self, region: Region, strategy: Strategy, mesh_shape: Sequence[int]) -> bool:
        """Return whether the executor and DTensor, on the whole mesh, run the region in the layouts of ``strategy``.

        DTensor is asked at the region's real shapes and on a mesh of the real sizes: smaller ones may differ.
        """
        shape = tuple(mesh_shape)
        key = ((region.signature, region.exits), shape, strategy)
        if key not in self._verified:
            with quiet_dtensor():
                self._verified[key] = self._runs_forward_and_backward(region, strategy, shape)
        return self._verified[key]

    def _runs_forward_and_backward(self, region: Region, strategy: Strategy, shape: tuple[int, ...]) -> bool:
        if sum(size > 1 for size in shape) <= 1 or not region.ops:
            return True
        rules = self._rules_on(shape, real_shapes=True)
        forward: dict[int, Layout | None] = {
            i: strategy.forward[i] for i, slot in enumerate(region.slots) if slot.origin != "op"
        }
        for region_op in region.ops:
            inputs = find_op_inputs(region, region_op)
            if own_rules(region_op.op, inputs) is not None:
                outputs: tuple[Layout | None, ...] | None = tuple(strategy.forward[i] for i in region_op.outputs)
            else:
                layouts = tuple(forward[i] for i in region_op.inputs)
                outputs = local_linear_outputs(region_op.op, inputs, layouts)
                if outputs is None:
                    outputs = rules.forward(region_op.op, inputs, layouts)
            if outputs is None:
                return False
            forward.update(zip(region_op.outputs, outputs, strict=True))
        if any(forward[i] != strategy.forward[i] for i in region.exits):
            return False
        return self._runs_backward(region, strategy, forward, rules)

    def _runs_backward(
        self, region: Region, strategy: Strategy, forward: dict[int, Layout | None], rules: DTensorRules
    ) -> bool:
        gradient: dict[int, Layout | None] = {i: strategy.gradient[i] for i in region.exits}
        for region_op in reversed(region.ops):
            arriving = tuple(gradient.get(i) for i in region_op.outputs)
            if all(layout is None for layout in arriving):
                continue
            inputs = find_op_inputs(region, region_op)
            if own_rules(region_op.op, inputs) is not None:
                input_gradients: tuple[Layout | None, ...] | None = tuple(
                    strategy.gradient[i] for i in region_op.inputs
                )
            else:
                layouts = tuple(forward[i] for i in region_op.inputs)
                input_gradients = local_linear_gradients(region_op.op, inputs, layouts, arriving)
                if input_gradients is None:
                    input_gradients = rules.backward(region_op.op, inputs, layouts, arriving)
            if input_gradients is None:
                return False
            for position, layout in zip(region_op.inputs, input_gradients, strict=True):
                if layout is not None and gradient.setdefault(position, layout) != layout:
                    return False
        boundary = [
            i
            for i, slot in enumerate(region.slots)
            if slot.origin in ("entry", "parameter") and slot.value.requires_grad
        ]
        return all(gradient.get(i) == strategy.gradient[i] for i in boundary)


def _layout(placements: Sequence[Placement | None]) -> Layout | None:
    """Return the layout with one placement per axis; None if the tensor is plain, or has no gradient."""
    if any(placement is None for placement in placements):
        return None
    return tuple(placement for placement in placements if placement is not None)
