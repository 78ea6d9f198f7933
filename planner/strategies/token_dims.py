"""`TokenDims`: the token dim of each tensor (the dim along which a sequence's tokens lie), found op by op.

An op does not depend on the order of tokens if it runs on shards of the token dim, by DTensor's rules or by
`own_rules`: it then works token by token, or shard by shard. The op's other inputs have no token dim, or have their
tokens in the same order. Tables of positions are reordered at the output of the module that computes them. Attention
has its own rule. A loss reorders its labels itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from planner.graph.op_graph import Crossing, Op, OpGraph, Value
from planner.model_rewrites import fused_kernels
from planner.regions.module_bodies import OUTSIDE
from planner.strategies import context_parallel
from planner.strategies.axis_strategies import AxisRules
from planner.strategies.own_rules import is_shardable_cross_entropy, own_rules

LOSSES = ("aten.cross_entropy_loss.default", fused_kernels.CROSS_ENTROPY)
"""Losses that reorder their labels, which are their second input."""

_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints")

_WEIGHT_DIMS: Mapping[str, Mapping[int, int]] = {
    "aten.linear.default": {1: 2, 2: 1},
    "aten.addmm.default": {0: 1, 2: 2},
    "aten.mm.default": {1: 2},
    "aten.matmul.default": {1: 2},
    "aten.layer_norm.default": {1: 1, 2: 1},
    "aten.rms_norm.default": {1: 1},
}
"""Op -> position of an input that may be a weight -> most dims that the weight can have without a token dim."""


class ModuleBoundary(NamedTuple):
    """A module boundary: the input or output ``path`` of the module ``fqn``."""

    fqn: str
    direction: Literal["input", "output"]
    path: str

    def __str__(self) -> str:
        """Return the boundary as a message names it."""
        return f"{self.direction} {self.path!r} of {self.fqn or 'the root'}"


class NotReorderableError(Exception):
    """The order of tokens in a model's sequences cannot be changed; the text is the reason."""


class BoundaryNeededError(Exception):
    """A tensor has to be reordered along ``dim`` at ``boundary``, where nothing is reordered yet."""

    def __init__(self, boundary: ModuleBoundary, dim: int) -> None:
        super().__init__(f"{boundary} along dim {dim}")
        self.boundary, self.dim = boundary, dim


class TokenDims:
    """The token dims of a graph's tensors.

    Args:
        rules: sharding rules of single ops on one axis.
        producers: value -> the op that computes it.
        length: tokens per sequence.
        boundaries: boundary -> the dim along which tensors are reordered there.
    """

    def __init__(
        self,
        graph: OpGraph,
        rules: AxisRules,
        producers: Mapping[str, Op],
        length: int,
        boundaries: Mapping[ModuleBoundary, int],
    ) -> None:
        self._graph, self._rules, self._producers = graph, rules, producers
        self._length, self._boundaries = length, boundaries
        self._dims: dict[str, int] = {}
        self._weights = {name for name, value in graph.values.items() if value.kind == "parameter"}

    def find_reordered_results(self) -> tuple[str, ...]:
        """Return the paths of the model outputs that are reordered, after following the tokens through all ops.

        Raises:
            NotReorderableError: an op or an output depends on the order of tokens.
            BoundaryNeededError: a tensor has to be reordered at one more boundary.
        """
        graph = self._graph
        for op in graph.ops:
            dims = [self._dim(name, path) for name, path in zip(op.inputs, op.crossings, strict=True)]
            if any(dim is not None for dim in dims):
                self._follow(op, dims)
            elif op.inputs and self._weights.issuperset(op.inputs):
                self._weights.update(op.outputs)
        for op in graph.ops:
            if op.target_name in (context_parallel.OP_NAME, *LOSSES) and op.inputs[0] not in self._dims:
                raise NotReorderableError(f"{op.target_name} in {module_of(graph, op)} is on other tokens")
        results = []
        for output in graph.outputs:
            is_reordered = self._dim(output.value, output.crossings) is not None
            if is_reordered and output.is_loss:
                raise NotReorderableError("the loss is no single number")
            if is_reordered:
                results.append(output.path)
        return tuple(results)

    def _dim(self, name: str, crossings: Sequence[Crossing]) -> int | None:
        """Return the token dim of a tensor after the boundaries that it crosses; None where it is not reordered."""
        dim = self._dims.get(name)
        for boundary in self._path(crossings):
            boundary_dim = self._boundaries.get(boundary)
            if boundary_dim is None:
                continue
            if dim is not None:
                raise NotReorderableError(f"{boundary} is reordered already where it would be reordered")
            shape = self._graph.values[name].shape
            if boundary_dim >= len(shape) or shape[boundary_dim] != self._length:
                raise NotReorderableError(f"{boundary} has other lengths elsewhere")
            dim = boundary_dim
        return dim

    def _path(self, crossings: Sequence[Crossing]) -> list[ModuleBoundary]:
        return [
            ModuleBoundary(self._graph.calls[c.call].fqn, c.direction, c.path) for c in crossings if c.call != OUTSIDE
        ]

    def _follow(self, op: Op, dims: list[int | None]) -> None:
        """Record the token dims of an op's outputs.

        Args:
            dims: token dims of the inputs.
        """
        inputs = [self._graph.values[name] for name in op.inputs]
        if op.target_name == context_parallel.OP_NAME:
            if any(dim != 2 for dim in dims):
                raise self._depends_on_order(op)
            output_dims: Sequence[int | None] = [2, *[None] * (len(op.outputs) - 1)]
        elif op.target_name in LOSSES:
            self._check_loss(op, inputs, dims)
            output_dims = [None]
        elif op.target_name in _VIEWS:
            output_dims = [self._dim_of_view(op, inputs[0], dims[0])]
        else:
            output_dims = self._dims_by_rule(op, inputs, dims)
        self._dims.update({name: dim for name, dim in zip(op.outputs, output_dims, strict=True) if dim is not None})

    def _check_loss(self, op: Op, inputs: Sequence[Value], dims: Sequence[int | None]) -> None:
        """Check that a loss is over rows of tokens, sample by sample, so that it can reorder its labels."""
        rows, labels = inputs[0].shape[0], inputs[1].shape
        if not is_shardable_cross_entropy(op, inputs) or dims != [0, None] or rows % self._length or labels != (rows,):
            raise self._depends_on_order(op)

    def _dim_of_view(self, op: Op, value: Value, dim: int | None) -> int:
        """Return the token dim of a view. Where dims are merged, the token dim has to be the innermost of them."""
        assert dim is not None
        inner, shape = math.prod(value.shape[dim + 1 :]), self._graph.values[op.outputs[0]].shape
        for position in range(len(shape)):
            has_same_inner = math.prod(shape[position + 1 :]) == inner
            if has_same_inner and shape[position] % self._length == 0:
                return position
        raise self._depends_on_order(op)

    def _dims_by_rule(self, op: Op, inputs: Sequence[Value], dims: Sequence[int | None]) -> list[int]:
        """Return the token dims of the outputs of an op that runs on shards of the inputs' token dims."""
        for position, dim in enumerate(self._aligned_dims(op, inputs, dims)):
            if dims[position] is None and dim is not None:
                self._request_reordering(op, position, dim)
        placements = self._output_placements(op, inputs, dims)
        if placements is None:
            raise self._depends_on_order(op)
        # The op has to keep the length: if tokens were repeated, the order of the repeated tokens would be ambiguous.
        lengths = {value.shape[dim] for value, dim in zip(inputs, dims, strict=True) if dim is not None}
        output_dims = []
        for name, placement in zip(op.outputs, placements, strict=True):
            if not isinstance(placement, Shard) or {self._graph.values[name].shape[placement.dim]} != lengths:
                raise self._depends_on_order(op)
            output_dims.append(placement.dim)
        return output_dims

    def _aligned_dims(self, op: Op, inputs: Sequence[Value], dims: Sequence[int | None]) -> list[int | None]:
        """Return, for each input, the dim that the op aligns with the token dim; None if the input has no such dim."""
        if op.target_name == fused_kernels.ROTARY:
            return [2, 1, 1]
        if not _is_pointwise(op):
            indices = [
                i for i, (value, dim) in enumerate(zip(inputs, dims, strict=True)) if dim is None and value.shape
            ]
            if indices and not self._are_weights(op, inputs, indices):
                raise self._depends_on_order(op)
            return [None] * len(inputs)
        # Broadcasting aligns dims from the last one.
        from_last = {dim - len(value.shape) for value, dim in zip(inputs, dims, strict=True) if dim is not None}
        if len(from_last) > 1:
            raise self._depends_on_order(op)
        (token_dim,) = from_last
        aligned = [len(value.shape) + token_dim for value in inputs]
        return [dim if dim >= 0 and value.shape[dim] > 1 else None for value, dim in zip(inputs, aligned, strict=True)]

    def _are_weights(self, op: Op, inputs: Sequence[Value], positions: Sequence[int]) -> bool:
        """Return whether the op reads all of these inputs for every token: none of their dims is a token dim."""
        if not self._weights.issuperset(op.inputs[i] for i in positions):
            return False
        if own_rules(op, inputs) is not None:
            return True
        most_dims = _WEIGHT_DIMS.get(op.target_name, {})
        return all(len(inputs[i].shape) <= most_dims.get(i, 0) for i in positions)

    def _output_placements(
        self, op: Op, inputs: Sequence[Value], dims: Sequence[int | None]
    ) -> tuple[Placement, ...] | None:
        """Return the placements of an op's outputs with its inputs sharded along ``dims``; None if it does not run."""

        def placement(value: Value, dim: int | None, *, plain: bool) -> Placement | None:
            if value.kind == "plain" and (plain or dim is None):
                return None
            return Replicate() if dim is None else Shard(dim)

        # Own rules may take a plain tensor as it is, or sharded.
        for plain in (False, True) if own_rules(op, inputs) is not None else (False,):
            placements = tuple(placement(value, dim, plain=plain) for value, dim in zip(inputs, dims, strict=True))
            outputs = self._rules.forward(op, inputs, placements)
            if outputs is not None and None in outputs and any(dim is not None for dim in dims):
                continue  # a buffer would get its elements in another order
            if outputs is not None:
                return tuple(output or Replicate() for output in outputs)
        return None

    def _request_reordering(self, op: Op, position: int, dim: int) -> None:
        """Raise the error that asks for a reordering of an input of ``op`` along ``dim``, or rules it out.

        Raises:
            BoundaryNeededError: the input is plain and crosses a module boundary, or is computed from such a tensor.
            NotReorderableError: there is no such boundary.
        """
        name, path = op.inputs[position], self._path(op.crossings[position])
        if self._graph.values[name].kind == "plain" and path:
            raise BoundaryNeededError(path[0], dim)
        producer = self._producers.get(name)
        if producer is not None:
            inputs = [self._graph.values[source] for source in producer.inputs]
            for source_position, source in enumerate(inputs):
                for source_dim, length in enumerate(source.shape):
                    if source.kind != "parameter" and length == self._length:
                        dims = [source_dim if index == source_position else None for index in range(len(inputs))]
                        outputs = self._output_placements(producer, inputs, dims)
                        if outputs is not None and Shard(dim) in outputs:
                            self._request_reordering(producer, source_position, source_dim)
        raise NotReorderableError(
            f"{op.target_name} in {module_of(self._graph, op)} reads a tensor with a place for each token, which is "
            "not made in a module of its own"
        )

    def _depends_on_order(self, op: Op) -> NotReorderableError:
        return NotReorderableError(
            f"{op.target_name} in {module_of(self._graph, op)} may depend on the order of tokens"
        )


def module_of(graph: OpGraph, op: Op) -> str:
    """Return the module that an op runs in, as a message names it."""
    return graph.calls[op.call].fqn or "the root"


def _is_pointwise(op: Op) -> bool:
    return torch.Tag.pointwise in getattr(op.target, "tags", ())
