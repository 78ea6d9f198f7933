"""Local ops: DTensor has no rule for them, so that each rank runs them on its local tensors (``executor.ops.local``).

Such an op runs on replicated tensors, or with its inputs split on dims along which it works piece by piece, which
`planner.model_rewrites.independent_dims` finds by trying: most often the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, shard_counts
from planner.graph.op_graph import Op, OpGraph, Ref, Value, build_digraph
from planner.graph.run_op import run_op, with_tensors
from planner.model_rewrites.independent_dims import (
    Dims,
    check_recurrent,
    split_outputs,
    with_plain_split,
    without_chance,
)
from planner.model_rewrites.opaque_op import OP_NAME, SAMPLES, OpaqueArguments
from planner.regions.regions import op_signature
from planner.strategies.axis_rule import AxisRule, InnerCollective

R = Replicate()

ALWAYS_LOCAL = frozenset({
    "group_norm",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
})  # fmt: skip
"""Ops that DTensor runs on replicated tensors only, takes apart into many, or runs on some memory formats only."""


def packet_name(op: Op) -> str:
    """Return the name of an op without its overload, by which the executor knows the call; "" for other targets."""
    return op.target._overloadpacket.__name__ if isinstance(op.target, torch._ops.OpOverload) else ""


def with_local_ops(graph: OpGraph, names: frozenset[str]) -> OpGraph:
    """Return ``graph`` with all ops of these names marked as local."""
    ops = [dataclasses.replace(op, is_local=op.is_local or packet_name(op) in names) for op in graph.ops]
    return dataclasses.replace(graph, digraph=build_digraph(ops))


def local_names(graph: OpGraph) -> tuple[str, ...]:
    """Return the names of the local ops of ``graph``, sorted."""
    return tuple(sorted({packet_name(op) for op in graph.ops if op.is_local}))


def can_be_local(op: Op) -> bool:
    """Return whether ranks can run ``op`` on their own: it changes no tensor."""
    return bool(packet_name(op)) and not op.target._schema.is_mutable


def local_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    """Return the rules of a local op: on replicated tensors, and with inputs split on dims 0 or 1.

    Plain inputs have no placement: each rank takes its piece of those that go with the split.
    """
    return [_rule(inputs, dims, outputs) for dims, outputs in _splits(_Call(op, tuple(inputs)))]


def _rule(inputs: Sequence[Value], dims: Dims, outputs: Dims) -> AxisRule:
    """Return the rule of one split; what stays whole has a gradient that is a sum over the pieces."""
    whole: Placement = R if all(dim is None for dim in dims) else Partial()

    def place(dim: int | None) -> Placement:
        return R if dim is None else Shard(dim)

    results = tuple(map(place, outputs))
    return AxisRule(
        inputs=tuple(None if v.kind == "plain" else place(dim) for v, dim in zip(inputs, dims, strict=True)),
        outputs=results,
        output_gradients=results,
        input_gradients=tuple(
            (whole if dim is None else Shard(dim)) if value.requires_grad else None
            for value, dim in zip(inputs, dims, strict=True)
        ),
    )


class _Call:
    """An op and its inputs, as a key: equal for equal calls."""

    def __init__(self, op: Op, inputs: tuple[Value, ...]) -> None:
        self.op, self.inputs = op, inputs
        self._key = op_signature(op, inputs), tuple(value.kind for value in inputs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(maxsize=1024)
def _splits(key: _Call) -> tuple[tuple[Dims, Dims], ...]:
    options = [
        (None,) if value.kind in ("plain", "parameter") else (*range(min(2, len(value.shape))), None)
        for value in key.inputs
    ]
    shapes = [value.shape for value in key.inputs]
    plain = [position for position, value in enumerate(key.inputs) if value.kind == "plain"]
    outputs_of = functools.partial(_split_outputs, key.op, key.inputs)
    found: list[tuple[Dims, Dims]] = []
    for dims in dict.fromkeys(itertools.product(*options)):
        if all(dim is None for dim in dims):
            found.append((dims, (None,) * len(key.op.outputs)))
        elif (split := with_plain_split(outputs_of, shapes, dims, plain, packet_name(key.op))) is not None:
            found.append((dims, split[1]))
    return tuple(found)


def _split_outputs(op: Op, inputs: tuple[Value, ...], dims: Dims) -> Dims | None:
    name = packet_name(op)
    args, kwargs = pytree.tree_map(
        lambda leaf: without_chance(name, leaf), (op.args, dict(op.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Ref)
    )
    trial = dataclasses.replace(op, args=args, kwargs=kwargs)

    def run(tensors: list[torch.Tensor]) -> Any:
        check_recurrent(name, with_tensors(trial.args, tensors))
        return run_op(trial, tensors)

    return split_outputs(run, [value.shape for value in inputs], [value.dtype for value in inputs], dims, name)


def opaque_splits(graph: OpGraph) -> dict[str, str]:
    """Return FQN of an opaque module -> how it runs on samples, as text."""
    return {graph.calls[op.call].fqn: OpaqueArguments(*op.args).split for op in graph.ops if op.target_name == OP_NAME}


def opaque_causes(graph: OpGraph) -> dict[str, str]:
    """Return FQN of an opaque module -> why it runs as one op; "" for those that were named."""
    return {graph.calls[op.call].fqn: OpaqueArguments(*op.args).cause for op in graph.ops if op.target_name == OP_NAME}


def opaque_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    """Return the rules of the call of an opaque module.

    On each rank's samples, the gradient of what is whole, such as a parameter, is a sum over the ranks.
    """
    split = OpaqueArguments(*op.args).sample_split
    count = len(split.outputs) if split else len(op.outputs)
    rules = [_opaque_rule(inputs, [R] * len(inputs), [R] * count, R)]
    if split:
        places = [Shard(0) if place == SAMPLES else R for place in split.inputs.values()]
        parameters = [R] * (len(inputs) - len(places))
        results = [Shard(0) if place == SAMPLES else R for place in split.outputs]
        rules.append(_opaque_rule(inputs, [*places, *parameters], results, Partial()))
    return rules


def _opaque_rule(
    inputs: Sequence[Value], places: Sequence[Placement], results: Sequence[Placement], whole: Placement
) -> AxisRule:
    return AxisRule(
        inputs=tuple(None if v.kind == "plain" else place for v, place in zip(inputs, places, strict=True)),
        outputs=tuple(results),
        output_gradients=tuple(results),
        input_gradients=tuple(
            (whole if place == R else place) if value.requires_grad else None
            for value, place in zip(inputs, places, strict=True)
        ),
    )


def samples_divide(
    op: Op, shapes: Sequence[Sequence[int]], layouts: Sequence[Layout | None], mesh_shape: Sequence[int]
) -> bool:
    """Return whether each rank has whole samples of the arguments of ``op``, if it is a call of an opaque module.

    Args:
        op: any op.
        shapes, layouts: of its inputs.
        mesh_shape: sizes of the mesh's axes.
    """
    if op.target_name != OP_NAME:
        return True
    call = OpaqueArguments(*op.args)
    places = () if call.sample_split is None else call.sample_split.inputs.values()
    split = [
        (shape[0] // rows, shard_counts(layout, tuple(mesh_shape), len(shape))[0])
        for place, rows, shape, layout in zip(places, call.rows, shapes, layouts, strict=False)
        if place == SAMPLES and layout is not None
    ]
    return all(samples % ranks == 0 for samples, ranks in split)


def opaque_collectives(
    op: Op, layouts: Sequence[Layout | None], mesh_shape: Sequence[int]
) -> tuple[InnerCollective, ...]:
    """Return the all-reduces of the numbers among an opaque module's results, over each axis that splits samples."""
    call = OpaqueArguments(*op.args)
    if call.sample_split is None:
        return ()
    return tuple(
        InnerCollective(kind="all_reduce", axis=axis, nbytes=dtype.itemsize)
        for place, dtype in zip(call.sample_split.outputs, call.result_dtypes, strict=True)
        if place != SAMPLES
        for axis, size in enumerate(mesh_shape)
        if size > 1 and any(layout is not None and layout[axis] == Shard(0) for layout in layouts)
    )
