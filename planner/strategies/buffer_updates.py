"""Sharding rules and collectives of the ops that update buffers, which stay whole on every rank, and of cached states.

`batch_norm`  An axis may shard the channels, and all-gathers the running statistics that it has updated. An axis may
shard the batch or a spatial dim: it all-gathers the statistics of its ranks, and all-reduces two sums in the backward.
`instance_norm` with running statistics  Only replicated.
Writes to plain tensors (`planner.graph.op_graph.writes_plain`)  Any layout of what is written. The executor makes it
whole, the last axis first, by an all-gather or an all-reduce on each axis (`executor.ops.buffers.plain_writes`).
`shardplan.cached_state`  A state that a step of decoding reads and updates: any layout.
`shardplan.with_new_token`  Keys or values to which a step appends: the layout in which the cache has them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.layouts.layout import Layout
from planner.graph.op_graph import Op, Value
from planner.strategies.axis_rule import AxisRule, InnerCollective

BATCH_NORM = "aten.batch_norm.default"
INSTANCE_NORM = "aten.instance_norm.default"
R = Replicate()
P = Partial()
AVERAGE = Partial("avg")
"""Placement of a mean over a sharded dim."""
CHANNELS = Shard(1)
_STATISTICS = 2
"""Mean and variance, or the two sums of the backward."""


def batch_norm_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    """Return the rules of `batch_norm`: replicated, or one dim of the input sharded."""
    dims = len(inputs[0].shape)
    return [_norm_rule(inputs, place) for place in (R, *(Shard(dim) for dim in range(dims)))]


def instance_norm_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule] | None:
    """Return the rule of an `instance_norm` that updates running statistics; None for one that does not."""
    updates = len(op.args) > 5 and op.args[3] is not None and op.args[5]
    return [_norm_rule(inputs, R)] if updates else None


def _norm_rule(inputs: Sequence[Value], place: Placement) -> AxisRule:
    parameter = Shard(0) if place == CHANNELS else R
    parameter_gradient = parameter if place in (R, CHANNELS) else P
    placements = (place, *(parameter,) * (len(inputs) - 1))
    gradients = (place, *(parameter_gradient,) * (len(inputs) - 1))
    return AxisRule(
        inputs=tuple(None if value.kind == "plain" else p for value, p in zip(inputs, placements, strict=True)),
        outputs=(place,),
        output_gradients=(place,),
        input_gradients=tuple(g if value.requires_grad else None for value, g in zip(inputs, gradients, strict=True)),
    )


def write_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    """Return the rules of an op that writes to a plain tensor: all placements of the other tensors."""

    def options(value: Value) -> tuple[Placement | None, ...]:
        return (None,) if value.kind == "plain" else (R, P, AVERAGE, *(Shard(dim) for dim in range(len(value.shape))))

    no_gradients = (None,) * len(inputs)
    return [
        AxisRule(inputs=placements, outputs=(None,), output_gradients=(None,), input_gradients=no_gradients)
        for placements in itertools.product(*map(options, inputs))
    ]


def write_collectives(
    inputs: Sequence[Value], layouts: Sequence[Layout | None], shapes: Sequence[tuple[int, ...]], mesh: Sequence[int]
) -> tuple[InnerCollective, ...]:
    """Return the collectives that make the tensors whole that an op writes to a plain tensor.

    Args:
        inputs: the op's inputs.
        layouts: layout of each input; None for a plain tensor.
        shapes: shape of each input's shard.
        mesh: sizes of the axes.
    """
    collectives: list[InnerCollective] = []
    for value, layout, shape in zip(inputs, layouts, shapes, strict=True):
        nbytes = math.prod(shape) * value.dtype.itemsize
        for axis in reversed(range(len(layout or ()))):
            if mesh[axis] == 1 or layout is None or layout[axis] == R:
                continue
            is_partial = layout[axis].is_partial()
            nbytes *= 1 if is_partial else mesh[axis]
            kind: CollectiveKind = "all_reduce" if is_partial else "all_gather"
            collectives.append(InnerCollective(kind=kind, axis=axis, nbytes=nbytes))
    return tuple(collectives)


def batch_norm_collectives(
    op: Op, inputs: Sequence[Value], layouts: Sequence[Layout | None], mesh: Sequence[int]
) -> tuple[InnerCollective, ...]:
    """Return the collectives of `batch_norm` in training, which are in full precision; there are none in evaluation."""
    layout = layouts[0]
    assert layout is not None
    training = op.args[5]
    if not training:
        return ()
    axes = [axis for axis, size in enumerate(mesh) if size > 1 and layout[axis] != R]
    channel_axes = [axis for axis in axes if layout[axis] == CHANNELS]
    batch_axes = [axis for axis in axes if layout[axis] != CHANNELS]
    itemsize = max(4, inputs[0].dtype.itemsize)
    channels = inputs[0].shape[1] // math.prod(mesh[axis] for axis in channel_axes)
    nbytes = _STATISTICS * channels * itemsize
    forward = [InnerCollective(kind="all_gather", axis=axis, nbytes=nbytes * mesh[axis]) for axis in batch_axes]
    backward = [InnerCollective(kind="all_reduce", axis=axis, nbytes=nbytes, phase="backward") for axis in batch_axes]
    if not inputs[0].requires_grad and not any(value.requires_grad for value in inputs):
        backward = []
    running = [value for value in inputs if value.kind == "plain"]
    gathered = len(running) * channels * (running[0].dtype.itemsize if running else 0)
    for axis in reversed(channel_axes) if running else ():
        gathered *= mesh[axis]
        forward.append(InnerCollective(kind="all_gather", axis=axis, nbytes=gathered))
    return (*forward, *backward)


def cached_state_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    """Return the rules of a state, which is in any layout in the cache, with samples where the layer's input has them.

    An axis that splits the input by another dim, or not at all, may split any other dim of the state.
    """
    others = [R, *(Shard(dim) for dim in range(1, len(inputs[0].shape)))]
    kept = [R, *(Shard(dim + 1) for dim in range(len(op.args[1])))]
    pairs = [(Shard(0), Shard(0)), *((tokens, state) for tokens in others for state in kept)]
    return [
        AxisRule(inputs=(tokens,), outputs=(state,), output_gradients=(None,), input_gradients=(None,))
        for tokens, state in pairs
    ]


def append_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    """Return the rules of `with_new_token`: all tensors are split alike, by any dim but that of the tokens."""
    dims = len(inputs[0].shape)
    places = (R, *(Shard(dim) for dim in range(dims) if dim != dims - 2))
    return [
        AxisRule(inputs=(place, place), outputs=(place,), output_gradients=(None,), input_gradients=(None, None))
        for place in places
    ]
