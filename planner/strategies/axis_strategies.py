"""Strategies of a region on one mesh axis, by depth-first search over the placements of its tensors."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cost_model.layouts.layout import divides
from planner.graph.op_graph import Op, Value, writes_plain
from planner.regions.module_bodies import OUTSIDE
from planner.regions.regions import Region, RegionOp, find_op_inputs
from planner.strategies.buffer_updates import AVERAGE
from planner.strategies.dtensor_rules import DTensorRules
from planner.strategies.own_rules import dtensor_may_run, own_rules, strided_placements

R = Replicate()
P = Partial()

Placements = tuple[Placement | None, ...]

_Placed = dict[int, Placement | None]
"""Slot -> placement of the tensor, or of its gradient. None: the tensor is plain, or has no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisStrategy:
    """A way to run a region on one mesh axis.

    Attributes:
        forward: placement of each slot; None for a plain tensor.
        gradient: placement of each slot's gradient; None where there is none.
    """

    forward: Placements
    gradient: Placements


def gradient_options(placement: Placement) -> tuple[Placement, ...]:
    """Return the placements that the gradient of a boundary tensor may have, given the tensor's ``placement``."""
    if type(placement) is Replicate:
        return (R, P)
    if type(placement) in (Shard, _StridedShard):
        return (placement,)
    return (R,) if type(placement) is Partial and placement.reduce_op == "sum" else ()


class AxisRules:
    """Forward and backward of single ops on one mesh axis: by `own_rules` where an op has any, else by DTensor."""

    def __init__(self, rules: DTensorRules) -> None:
        self._rules = rules

    def forward(self, op: Op, inputs: Sequence[Value], placements: Placements) -> Placements | None:
        """Return the placements of the op's outputs; None where the op does not run on inputs in ``placements``."""
        own = own_rules(op, inputs)
        if own is not None:
            return next((rule.outputs for rule in own if rule.inputs == placements), None)
        if not dtensor_may_run(op, placements):
            return None
        layouts = self._rules.forward(op, inputs, tuple(None if p is None else (p,) for p in placements))
        return None if layouts is None else tuple(layout[0] for layout in layouts if layout is not None)

    def backward(
        self, op: Op, inputs: Sequence[Value], placements: Placements, gradients: Placements
    ) -> Placements | None:
        """Return the placements of the gradients of the op's inputs; None where its backward does not run.

        Args:
            placements: placements of the inputs.
            gradients: placements of the outputs' gradients.
        """
        own = own_rules(op, inputs)
        if own is not None:
            return next(
                (
                    rule.input_gradients
                    for rule in own
                    if rule.inputs == placements and _arrive_as(gradients, rule.output_gradients)
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


def _arrive_as(gradients: Placements, expected: Placements) -> bool:
    """Return whether the gradients of an op's outputs are as ``expected``; of several, some may not arrive."""
    if len(gradients) == 1:
        return gradients == expected
    return all(gradient in (None, place) for gradient, place in zip(gradients, expected, strict=True))


_MOST_CHOICES = 1024
"""Placements of an op's inputs that are tried. A ``stack`` of 32 tensors in 4 placements each would have 4**32."""


def _alike(options: Sequence[Sequence[Placement | None]]) -> Iterator[Placements]:
    """Yield one choice of each of ``options``, where equal options have equal choices."""
    kinds = list(dict.fromkeys(map(tuple, options)))
    for choice in itertools.product(*kinds):
        by_kind = dict(zip(kinds, choice, strict=True))
        yield tuple(by_kind[tuple(option)] for option in options)


_MOST_STEPS = 50_000
"""Steps of a search, each of which tries one op. Regions of usual models take a few thousand, and at most 15,000; a
loop over time with an attention in each step would take more than a million."""


def find_axis_strategies(region: Region, rules: AxisRules, axis_size: int) -> Iterator[AxisStrategy]:
    """Yield the strategies of ``region`` on one axis of ``axis_size`` ranks; some may occur twice.

    Where there are too many to try, those in which nothing is split, or samples alone, come after what was found.
    """
    search = _RegionSearch(region, rules, axis_size)
    yield from search.run()
    if search.was_cut_short:
        samples = Counter(slot.value.shape[0] for slot in region.slots if slot.origin == "entry" and slot.value.shape)
        for size in (0, *(size for size, _ in samples.most_common(1))):
            yield from _RegionSearch(region, rules, axis_size, samples=size).run()


def _depth_first(start: _Placed, steps: int, expand: Callable[[_Placed, int], Iterator[_Placed]]) -> Iterator[_Placed]:
    """Yield all states after ``steps`` steps from ``start``; ``expand`` yields the states after one step of a state.

    A region has thousands of ops where a module loops over time: too many for a recursion.
    """
    pending = [iter((start,))]
    while pending:
        state = next(pending[-1], None)
        if state is None:
            pending.pop()
        elif len(pending) > steps:
            yield state
        else:
            pending.append(expand(state, len(pending) - 1))


class _RegionSearch:
    """Search over the placements of one region: forward through its ops, then backward for their gradients."""

    def __init__(self, region: Region, rules: AxisRules, axis_size: int, *, samples: int | None = None) -> None:
        """Begin a search.

        Args:
            samples: entries are split on their first dim of this size, and all else is replicated. None: each slot may
                have any placement.
        """
        self._samples = samples
        self._steps = 0
        self._region = region
        self._rules = rules
        self._size = axis_size
        self._exits = set(region.exits)
        read = {i for op in region.ops if not writes_plain(op.op, find_op_inputs(region, op)) for i in op.inputs}
        self._written = {i for op in region.ops for i in op.inputs} - read - self._exits

    def run(self) -> Iterator[AxisStrategy]:
        slots, steps = range(len(self._region.slots)), len(self._region.ops)
        for through in _depth_first({}, steps, self._forward):
            for forward in self._with_unread(through):
                for arrived in _depth_first({}, steps, functools.partial(self._backward, forward)):
                    for gradient in self._finish(forward, arrived):
                        yield AxisStrategy(
                            forward=tuple(forward.get(i) for i in slots), gradient=tuple(gradient.get(i) for i in slots)
                        )

    @property
    def was_cut_short(self) -> bool:
        """Whether there were too many steps, so that strategies are missing."""
        return self._steps > _MOST_STEPS

    # --- forward -------------------------------------------------------------------------------------------------

    def _forward(self, forward: _Placed, step: int) -> Iterator[_Placed]:
        """Yield ``forward``, the placements of slots that ops before ``step`` read or write, with those of this op."""
        self._steps += 1
        if self.was_cut_short:
            return
        region_op = self._region.ops[step]
        inputs = find_op_inputs(self._region, region_op)
        unplaced = list(dict.fromkeys(i for i in region_op.inputs if i not in forward))
        options = [[*self._options(i), *self._strided_options(region_op, i)] for i in unplaced]
        for choice in self._choices(region_op, inputs, forward, unplaced, options):
            placed = forward | dict(zip(unplaced, choice, strict=True))
            outputs = self._rules.forward(region_op.op, inputs, tuple(placed[i] for i in region_op.inputs))
            if outputs is not None and all(map(self._may_pass_on, region_op.outputs, outputs)):
                yield placed | dict(zip(region_op.outputs, outputs, strict=True))

    def _with_unread(self, forward: _Placed) -> Iterator[_Placed]:
        """Yield ``forward`` with the placements of slots that no op reads or writes."""
        unread = [i for i, slot in enumerate(self._region.slots) if slot.origin != "op" and i not in forward]
        for choice in itertools.product(*(list(self._options(i)) for i in unread)):
            yield forward | dict(zip(unread, choice, strict=True))

    def _choices(
        self,
        region_op: RegionOp,
        inputs: Sequence[Value],
        forward: _Placed,
        unplaced: Sequence[int],
        options: Sequence[Sequence[Placement | None]],
    ) -> Iterable[Placements]:
        """Return the placements to try for the ``unplaced`` slots: all, or those that an op's own rules have.

        Of an op with very many tensors, those that may be placed alike are placed alike.

        Args:
            options: the placements that each of these slots may have.
        """
        own = own_rules(region_op.op, inputs)
        if own is None:
            return itertools.product(*options) if math.prod(map(len, options)) <= _MOST_CHOICES else _alike(options)
        found: dict[Placements, tuple[int, ...]] = {}
        for rule in own:
            placed = dict(forward)
            if any(placed.setdefault(i, p) != p for i, p in zip(region_op.inputs, rule.inputs, strict=True)):
                continue
            choice = tuple(placed[i] for i in unplaced)
            if all(place in allowed for place, allowed in zip(choice, options, strict=True)):
                found[choice] = tuple(allowed.index(place) for place, allowed in zip(choice, options, strict=True))
        return sorted(found, key=found.__getitem__)  # in the order of the product

    def _may_pass_on(self, position: int, placement: Placement | None) -> bool:
        """Return whether an op may pass a tensor with this placement to the next op.

        Two placements are ruled out. The planner has no redistribution from partial results other than sums, except
        where the results are only written to buffers. A strided shard, which a view that merges a sharded dim returns,
        has state that the placement does not show: DTensor's behaviour on single ops would not tell its behaviour on
        the whole region.
        """
        if placement is None:
            return True
        if isinstance(placement, _StridedShard):
            return False
        return not placement.is_partial() or placement == P or (placement == AVERAGE and position in self._written)

    def _options(self, position: int) -> Iterator[Placement | None]:
        slot = self._region.slots[position]
        if slot.origin == "plain":
            yield None
            return
        if self._samples is not None:
            is_split = slot.origin == "entry" and self._samples in slot.value.shape and not self._samples % self._size
            yield Shard(slot.value.shape.index(self._samples)) if is_split else R
            return
        yield R
        for dim, length in enumerate(slot.value.shape[:1] if slot.is_result else slot.value.shape):
            if length % self._size == 0 and length >= self._size:
                yield Shard(dim)
        if slot.origin == "entry" and slot.value.requires_grad and self._region.call != OUTSIDE:
            yield P

    def _strided_options(self, region_op: RegionOp, position: int) -> Iterator[Placement]:
        slot = self._region.slots[position]
        if self._samples is None and slot.origin == "parameter" and self._region.call != OUTSIDE:
            for placement in strided_placements(region_op.op, region_op.inputs.index(position)):
                if divides(slot.value.shape, (placement,), (self._size,)):
                    yield placement

    # --- backward ------------------------------------------------------------------------------------------------

    def _backward(self, forward: _Placed, gradient: _Placed, step: int) -> Iterator[_Placed]:
        """Yield ``gradient``, the placements of gradients after the backward of later ops, with those of one more.

        Args:
            forward: the placement of each slot.
            gradient: placements of the gradients that have been computed.
            step: number of ops whose backward has run.
        """
        self._steps += 1
        if self.was_cut_short:
            return
        region_op = self._region.ops[-1 - step]
        exits = [i for i in region_op.outputs if i in self._exits]
        undecided = [i for i in exits if self._region.slots[i].value.requires_grad and gradient.get(i) is None]
        for choice in itertools.product(*(self._gradient_options(forward, i) for i in undecided)):
            state = gradient | dict(zip(undecided, choice, strict=True))
            if not all(self._is_valid_gradient(forward[i], state.get(i)) for i in exits):
                continue
            after = self._through_op(region_op, forward, state)
            if after is not None:
                yield after

    def _through_op(self, region_op: RegionOp, forward: _Placed, gradient: _Placed) -> _Placed | None:
        """Return the gradients' placements after the backward of one op; None where it does not run."""
        arriving = tuple(gradient.get(i) for i in region_op.outputs)
        if all(placement is None for placement in arriving):
            return gradient
        inputs = find_op_inputs(self._region, region_op)
        placements = tuple(forward[i] for i in region_op.inputs)
        input_gradients = self._rules.backward(region_op.op, inputs, placements, arriving)
        if input_gradients is None:
            return None
        state = dict(gradient)
        for position, placement in zip(region_op.inputs, input_gradients, strict=True):
            if placement is None or not self._region.slots[position].value.requires_grad:
                continue
            if state.get(position, placement) != placement:
                return None  # autograd cannot add gradients of two uses in different placements
            state[position] = placement
        return state

    def _finish(self, forward: _Placed, gradient: _Placed) -> Iterator[_Placed]:
        """Yield ``gradient`` with the placements of gradients that no op of the region computes."""
        is_outside = self._region.call == OUTSIDE
        boundary = [
            i
            for i, slot in enumerate(self._region.slots)
            if slot.origin in ("entry", "parameter") and slot.value.requires_grad
        ]
        undecided = [i for i in boundary if gradient.get(i) is None and (i in self._exits or is_outside)]
        for choice in itertools.product(*(self._gradient_options(forward, i) for i in undecided)):
            if is_outside and any(placement.is_partial() for placement in choice):
                continue
            state = gradient | dict(zip(undecided, choice, strict=True))
            if all(self._is_valid_gradient(forward[i], state.get(i)) for i in boundary):
                yield state

    @staticmethod
    def _gradient_options(forward: _Placed, position: int) -> tuple[Placement, ...]:
        placement = forward[position]
        return () if placement is None else gradient_options(placement)

    @staticmethod
    def _is_valid_gradient(placement: Placement | None, gradient: Placement | None) -> bool:
        return gradient is None or (placement is not None and gradient in gradient_options(placement))


def batch_only_strategies(
    region: Region, strategies: Sequence[AxisStrategy], shapes: Sequence[tuple[int, ...]], size: int
) -> tuple[AxisStrategy, ...]:
    """Return the strategies that replicate parameters and shard activations on the batch dim only.

    Only the strategies that shard the most activations are returned: every activation that any such strategy shards. If
    no strategy shards all of these activations, all such strategies are returned. An activation whose batch is not
    divisible by ``size`` is replicated.

    Args:
        shapes: shape of each slot at the current batch.
        size: ranks of the axis.
    """

    def batch_shards(strategy: AxisStrategy) -> frozenset[int] | None:
        """Return the slots that are sharded on the batch dim; None where anything else is sharded."""
        shards = set[int]()
        for position, (slot, placement) in enumerate(zip(region.slots, strategy.forward, strict=True)):
            if slot.origin not in ("entry", "parameter") or placement in (None, R):
                continue
            if slot.origin == "parameter" or placement != Shard(0) or shapes[position][0] % size:
                return None
            shards.add(position)
        return frozenset(shards)

    batch_only = [(strategy, shards) for strategy in strategies if (shards := batch_shards(strategy)) is not None]
    most = frozenset().union(*(shards for _, shards in batch_only))
    return tuple(strategy for strategy, shards in batch_only if shards == most) or tuple(s for s, _ in batch_only)
