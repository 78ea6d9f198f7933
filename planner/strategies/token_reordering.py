"""Whether a model's sequences may come in another order, and where they are to be brought into it.

Followed op by op: a tensor is *ordered* along the dim that tokens lie on. Ids are, from where they come in. An op hands
the order on where DTensor, or a rule of ours, runs it on pieces of that dim: then it works token by token, or piece by
piece, and does not see which comes first. What it reads beside has to be without that dim, or in the same order: tables
of positions are brought into it where they leave the module that makes them. Attention is in order under its own rule,
and the loss, which brings its labels in order. Whatever else is met is a reason why not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from planner.graph.op_graph import Crossing, Op, OpGraph, Value, build_digraph
from planner.model_rewrites import fused_kernels
from planner.regions.module_bodies import OUTSIDE
from planner.strategies import context_parallel
from planner.strategies.dtensor_rules import quiet_dtensor
from planner.strategies.enumerate import AxisRules, StrategyTable
from planner.strategies.own_rules import is_shardable_cross_entropy, own_rules

LOSSES = ("aten.cross_entropy_loss.default", fused_kernels.CROSS_ENTROPY)
"""Ops that bring their labels, their second input, in order themselves."""

_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints")
_EMBEDDING = "aten.embedding.default"
_RANKS = 2
"""Of the axis on which ops are asked for."""

_WEIGHT_DIMS: Mapping[str, Mapping[int, int]] = {
    "aten.linear.default": {1: 2, 2: 1},
    "aten.addmm.default": {0: 1, 2: 2},
    "aten.mm.default": {1: 2},
    "aten.matmul.default": {1: 2},
    "aten.layer_norm.default": {1: 1, 2: 1},
    "aten.rms_norm.default": {1: 1},
}
"""Ops with weights -> which of their inputs may be weights, and of how many dims, so that none is that of tokens."""


class ModuleBoundary(NamedTuple):
    """A boundary that a tensor crosses: of which module, which way, and as what."""

    fqn: str
    direction: Literal["input", "output"]
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordering:
    """How a model's sequences are brought into another order.

    Attributes:
        length: of a sequence, in tokens.
        places: boundary -> the dim that is brought in order there.
        results: paths of what the model returns in that order: logits, say.
    """

    length: int
    places: Mapping[ModuleBoundary, int]
    results: tuple[str, ...]


class _RefusedError(Exception):
    """Why a model's sequences have to be in their own order."""


class _WantedError(Exception):
    """A tensor has to be brought in order at a boundary that nothing is brought in order at yet."""

    def __init__(self, place: ModuleBoundary, dim: int) -> None:
        super().__init__(f"{place} along dim {dim}")
        self.place, self.dim = place, dim


def find_reordering(graph: OpGraph) -> Reordering | str:
    """Return how the sequences of a model that is trained may be reordered, or why they may not."""
    try:
        with quiet_dtensor():
            return _find(graph)
    except _RefusedError as error:
        return str(error)


def with_zigzag_attention(graph: OpGraph) -> OpGraph:
    """Return ``graph`` with its attention said to be handed sequences in an even order where they are split."""
    ops = [
        dataclasses.replace(op, is_zigzag=True) if op.target_name == context_parallel.OP_NAME else op
        for op in graph.ops
    ]
    return dataclasses.replace(graph, digraph=build_digraph(ops))


def _find(graph: OpGraph) -> Reordering:
    length = _length(graph)
    rules = StrategyTable().axis_rules(_RANKS)
    makers = {value: op for op in graph.ops for value in op.outputs}
    places = _ids(graph, makers, length)
    while True:
        follower = _Follower(graph, rules, makers, length, places)
        try:
            return follower.follow()
        except _WantedError as wanted:
            if wanted.place in places:
                raise _RefusedError(f"{_text(wanted.place)} would have to be in two orders") from None
            places = {**places, wanted.place: wanted.dim}


def _length(graph: OpGraph) -> int:
    """Return the length of the sequences that attention is on."""
    found = set[int]()
    causal = False
    for op in graph.ops:
        if op.target_name == context_parallel.OP_NAME:
            inputs = [graph.values[name] for name in op.inputs]
            if len(inputs) > 3:
                raise _RefusedError(f"attention in {_module(graph, op)} has a mask")
            if any(len(value.shape) != 4 for value in inputs) or not context_parallel.may_split(op, inputs):
                raise _RefusedError(f"attention in {_module(graph, op)} cannot be split along the sequence")
            causal |= context_parallel.is_causal(op)
            found.update(value.shape[2] for value in inputs)
    if not causal:
        raise _RefusedError("no attention has a causal mask")
    if len(found) > 1:
        raise _RefusedError(f"attention is on sequences of {' and '.join(map(str, sorted(found)))} tokens")
    return found.pop()


def _ids(graph: OpGraph, makers: Mapping[str, Op], length: int) -> dict[ModuleBoundary, int]:
    """Return where the ids come in that embeddings look up."""
    inputs = {given.value for given in graph.inputs}
    wanted = [op.inputs[1] for op in graph.ops if op.target_name == _EMBEDDING]
    found: dict[ModuleBoundary, int] = {}
    while wanted:
        name = wanted.pop()
        if name in makers:
            wanted += makers[name].inputs
        elif name in inputs and graph.values[name].shape[1:2] == (length,):
            path = next(given.path for given in graph.inputs if given.value == name)
            found[ModuleBoundary("", "input", path)] = 1
    if not found:
        raise _RefusedError("no embedding looks up ids that the model is called with")
    return found


class _Follower:
    """Follows the order from the ids on, with what is brought in order at some places."""

    def __init__(
        self,
        graph: OpGraph,
        rules: AxisRules,
        makers: Mapping[str, Op],
        length: int,
        places: Mapping[ModuleBoundary, int],
    ) -> None:
        self._graph, self._rules, self._makers = graph, rules, makers
        self._length, self._places = length, places
        self._dims: dict[str, int] = {}
        self._weights = {name for name, value in graph.values.items() if value.kind == "parameter"}

    def follow(self) -> Reordering:
        """Return the reordering, where nothing stands against it."""
        graph = self._graph
        for op in graph.ops:
            dims = [self._dim(name, path) for name, path in zip(op.inputs, op.crossings, strict=True)]
            if any(dim is not None for dim in dims):
                self._through(op, dims)
            elif op.inputs and self._weights.issuperset(op.inputs):
                self._weights.update(op.outputs)
        for op in graph.ops:
            if op.target_name in (context_parallel.OP_NAME, *LOSSES) and op.inputs[0] not in self._dims:
                raise _RefusedError(f"{op.target_name} in {_module(graph, op)} is on other tokens")
        results = []
        for output in graph.outputs:
            ordered = self._dim(output.value, output.crossings) is not None
            if ordered and output.is_loss:
                raise _RefusedError("the loss is no single number")
            if ordered:
                results.append(output.path)
        return Reordering(length=self._length, places=self._places, results=tuple(results))

    def _dim(self, name: str, crossings: Sequence[Crossing]) -> int | None:
        """Return the dim along which a tensor is in order behind the boundaries that it crosses."""
        dim = self._dims.get(name)
        for place in self._path(name, crossings):
            wanted = self._places.get(place)
            if wanted is None:
                continue
            if dim is not None:
                raise _RefusedError(f"{_text(place)} is in order before it is brought so")
            shape = self._graph.values[name].shape
            if wanted >= len(shape) or shape[wanted] != self._length:
                raise _RefusedError(f"{_text(place)} is of other lengths elsewhere")
            dim = wanted
        return dim

    def _path(self, name: str, crossings: Sequence[Crossing]) -> list[ModuleBoundary]:
        return [
            ModuleBoundary(self._graph.calls[c.call].fqn, c.direction, c.path) for c in crossings if c.call != OUTSIDE
        ]

    def _through(self, op: Op, dims: list[int | None]) -> None:
        inputs = [self._graph.values[name] for name in op.inputs]
        if op.target_name == context_parallel.OP_NAME:
            if any(dim != 2 for dim in dims):
                raise self._refused(op)
            found: Sequence[int | None] = [2, *[None] * (len(op.outputs) - 1)]
        elif op.target_name in LOSSES:
            self._check_loss(op, inputs, dims)
            found = [None]
        elif op.target_name in _VIEWS:
            found = [self._viewed(op, inputs[0], dims[0])]
        else:
            found = self._by_rule(op, inputs, dims)
        self._dims.update({name: dim for name, dim in zip(op.outputs, found, strict=True) if dim is not None})

    def _check_loss(self, op: Op, inputs: Sequence[Value], dims: Sequence[int | None]) -> None:
        """Check that a loss is over rows of tokens, sample by sample: its labels it can bring in order itself."""
        rows, labels = inputs[0].shape[0], inputs[1].shape
        if not is_shardable_cross_entropy(op, inputs) or dims != [0, None] or rows % self._length or labels != (rows,):
            raise self._refused(op)

    def _viewed(self, op: Op, value: Value, dim: int | None) -> int:
        """Return the dim of a view that tokens lie on: as its last factor where dims were merged."""
        assert dim is not None
        inner, shape = math.prod(value.shape[dim + 1 :]), self._graph.values[op.outputs[0]].shape
        for position in range(len(shape)):
            within = math.prod(shape[position + 1 :]) == inner
            if within and shape[position] % self._length == 0:
                return position
        raise self._refused(op)

    def _by_rule(self, op: Op, inputs: Sequence[Value], dims: Sequence[int | None]) -> list[int]:
        """Return the dims of what an op makes, where it runs on pieces of the dims of what it is given."""
        for position, dim in enumerate(self._beside(op, inputs, dims)):
            if dims[position] is None and dim is not None:
                self._want(op, position, dim)
        found = self._asked(op, inputs, dims)
        if found is None:
            raise self._refused(op)
        # As long as it was: of a token that is there twice, the next may come after either.
        lengths = {value.shape[dim] for value, dim in zip(inputs, dims, strict=True) if dim is not None}
        ordered = []
        for name, place in zip(op.outputs, found, strict=True):
            if not isinstance(place, Shard) or {self._graph.values[name].shape[place.dim]} != lengths:
                raise self._refused(op)
            ordered.append(place.dim)
        return ordered

    def _beside(self, op: Op, inputs: Sequence[Value], dims: Sequence[int | None]) -> list[int | None]:
        """Return for each input the dim that lies beside that of tokens; None where it has none."""
        if op.target_name == fused_kernels.ROTARY:
            return [2, 1, 1]
        if not _is_pointwise(op):
            others = [i for i, (value, dim) in enumerate(zip(inputs, dims, strict=True)) if dim is None and value.shape]
            if others and not self._are_weights(op, inputs, others):
                raise self._refused(op)
            return [None] * len(inputs)
        # Dims lie beside each other counted from the last.
        last = {dim - len(value.shape) for value, dim in zip(inputs, dims, strict=True) if dim is not None}
        if len(last) > 1:
            raise self._refused(op)
        (behind,) = last
        aligned = [len(value.shape) + behind for value in inputs]
        return [dim if dim >= 0 and value.shape[dim] > 1 else None for value, dim in zip(inputs, aligned, strict=True)]

    def _are_weights(self, op: Op, inputs: Sequence[Value], others: Sequence[int]) -> bool:
        """Tell whether these inputs are read whole for every token: no dim of theirs is that of tokens."""
        if not self._weights.issuperset(op.inputs[i] for i in others):
            return False
        if own_rules(op, inputs) is not None:
            return True
        most = _WEIGHT_DIMS.get(op.target_name, {})
        return all(len(inputs[i].shape) <= most.get(i, 0) for i in others)

    def _asked(self, op: Op, inputs: Sequence[Value], dims: Sequence[int | None]) -> tuple[Placement, ...] | None:
        """Return how an op's results are split whose inputs are, along ``dims``; None where it does not run so."""

        def placement(value: Value, dim: int | None, *, plain: bool) -> Placement | None:
            if value.kind == "plain" and (plain or dim is None):
                return None
            return Replicate() if dim is None else Shard(dim)

        for plain in (False, True) if own_rules(op, inputs) is not None else (False,):
            given = tuple(placement(value, dim, plain=plain) for value, dim in zip(inputs, dims, strict=True))
            found = self._rules.forward(op, inputs, given)
            if found is not None:
                return found
        return None

    def _want(self, op: Op, position: int, dim: int) -> None:
        """Ask for an input of ``op`` to be brought in order along ``dim``, where it comes from."""
        name, path = op.inputs[position], self._path(op.inputs[position], op.crossings[position])
        value = self._graph.values[name]
        if value.kind == "plain" and path:
            raise _WantedError(path[0], dim)
        maker = self._makers.get(name)
        if maker is not None:
            inputs = [self._graph.values[given] for given in maker.inputs]
            for other, given in enumerate(inputs):
                for candidate in range(len(given.shape)):
                    if given.kind != "parameter" and given.shape[candidate] == self._length:
                        dims = [candidate if index == other else None for index in range(len(inputs))]
                        found = self._asked(maker, inputs, dims)
                        if found is not None and Shard(dim) in found:
                            self._want(maker, other, candidate)
        raise _RefusedError(
            f"{op.target_name} in {_module(self._graph, op)} reads a tensor with a place for each token, which is not "
            "made in a module of its own"
        )

    def _refused(self, op: Op) -> _RefusedError:
        return _RefusedError(f"{op.target_name} in {_module(self._graph, op)} may depend on the order of tokens")


def _is_pointwise(op: Op) -> bool:
    return torch.Tag.pointwise in getattr(op.target, "tags", ())


def _module(graph: OpGraph, op: Op) -> str:
    return graph.calls[op.call].fqn or "the root"


def _text(place: ModuleBoundary) -> str:
    return f"{place.direction} {place.path!r} of {place.fqn or 'the root'}"
