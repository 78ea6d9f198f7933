"""`find_reordering`: whether a model's sequences may be in zigzag order, and at which module boundaries to reorder.

Token ids are reordered at the inputs of the model. Tables of positions are reordered at the output of the module that
computes them. `planner.strategies.token_dims` follows the tokens from these boundaries. If any op depends on the order
of tokens, the sequences are not reordered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from planner.graph.op_graph import Op, OpGraph, build_digraph
from planner.strategies import context_parallel
from planner.strategies.context_parallel_work import is_causal
from planner.strategies.dtensor_rules import quiet_dtensor
from planner.strategies.enumerate import StrategyTable
from planner.strategies.token_dims import (
    BoundaryNeededError,
    ModuleBoundary,
    NotReorderableError,
    TokenDims,
    module_of,
)

_EMBEDDING = "aten.embedding.default"
_RANKS = 2
"""Ranks of the axis on which the sharding rules of ops are asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordering:
    """The boundaries at which a model's sequences are reordered.

    Attributes:
        length: tokens per sequence.
        boundaries: boundary -> the dim along which tensors are reordered there.
        results: paths of the model's outputs that are in the new order (logits, for example).
    """

    length: int
    boundaries: Mapping[ModuleBoundary, int]
    results: tuple[str, ...]


def find_reordering(graph: OpGraph) -> Reordering | str:
    """Return the reordering of a model's sequences in training, or the reason (text) why none is possible."""
    try:
        with quiet_dtensor():
            return _find(graph)
    except NotReorderableError as error:
        return str(error)


def with_zigzag_attention(graph: OpGraph) -> OpGraph:
    """Return ``graph`` with ``is_zigzag`` set on all attention: sequences are in zigzag order if they are sharded."""
    ops = [
        dataclasses.replace(op, is_zigzag=True) if op.target_name == context_parallel.OP_NAME else op
        for op in graph.ops
    ]
    return dataclasses.replace(graph, digraph=build_digraph(ops))


def _find(graph: OpGraph) -> Reordering:
    length = _sequence_length(graph)
    rules = StrategyTable().axis_rules(_RANKS)
    producers = {value: op for op in graph.ops for value in op.outputs}
    boundaries = _token_ids(graph, producers, length)
    while True:
        try:
            results = TokenDims(graph, rules, producers, length, boundaries).find_reordered_results()
            return Reordering(length=length, boundaries=boundaries, results=results)
        except BoundaryNeededError as needed:
            if needed.boundary in boundaries:
                raise NotReorderableError(f"{needed.boundary} would have to be in two orders") from None
            boundaries = {**boundaries, needed.boundary: needed.dim}


def _sequence_length(graph: OpGraph) -> int:
    """Return the tokens per sequence, which all attention has in common.

    Raises:
        NotReorderableError: lengths differ, attention has a mask argument or cannot be split along the sequence, or no
            attention is causal.
    """
    lengths = set[int]()
    causal = False
    for op in graph.ops:
        if op.target_name == context_parallel.OP_NAME:
            inputs = [graph.values[name] for name in op.inputs]
            if len(inputs) > 3:
                raise NotReorderableError(f"attention in {module_of(graph, op)} has a mask")
            if any(len(value.shape) != 4 for value in inputs) or not context_parallel.may_split(op, inputs):
                raise NotReorderableError(f"attention in {module_of(graph, op)} cannot be split along the sequence")
            causal |= is_causal(op)
            lengths.update(value.shape[2] for value in inputs)
    if not causal:
        raise NotReorderableError("no attention has a causal mask")
    if len(lengths) > 1:
        raise NotReorderableError(f"attention is on sequences of {' and '.join(map(str, sorted(lengths)))} tokens")
    return lengths.pop()


def _token_ids(graph: OpGraph, producers: Mapping[str, Op], length: int) -> dict[ModuleBoundary, int]:
    """Return the model inputs with the ids that embeddings look up, and the token dim of these inputs.

    Raises:
        NotReorderableError: there are no such inputs.
    """
    inputs = {model_input.value for model_input in graph.inputs}
    unvisited = [op.inputs[1] for op in graph.ops if op.target_name == _EMBEDDING]
    boundaries: dict[ModuleBoundary, int] = {}
    while unvisited:
        name = unvisited.pop()
        if name in producers:
            unvisited += producers[name].inputs
        elif name in inputs and graph.values[name].shape[1:2] == (length,):
            path = next(model_input.path for model_input in graph.inputs if model_input.value == name)
            boundaries[ModuleBoundary("", "input", path)] = 1
    if not boundaries:
        raise NotReorderableError("no embedding looks up ids that the model is called with")
    return boundaries
