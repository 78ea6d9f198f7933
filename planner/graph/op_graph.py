"""The traced model as a graph of ops: values (tensors), ops, and the calls of modules that they live in."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import networkx as nx
import torch

ValueKind = Literal["input", "parameter", "plain", "activation"]
"""``plain`` values depend on no input and no parameter (masks, positions, buffers): every rank computes them whole."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value inside an op's argument template."""

    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor of the graph, with its global shape."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: ValueKind
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module: a frame of the forward pass."""

    index: int
    fqn: str
    parent: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value passing into (``input``) or out of (``output``) a module call, at argument ``path``."""

    call: int
    direction: Literal["input", "output"]
    path: str


@functools.cache
def overload_name(target: torch._ops.OpOverload) -> str:
    """Return the name of an op of torch's: it puts it together anew each time."""
    return str(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op: ``target`` applied to ``args`` and ``kwargs``, in which ``Ref`` stands for a value.

    ``crossings[i]`` are the module boundaries that input ``i`` passes between its producer and this op, in order.
    ``is_zigzag`` says of attention that pieces of sequences come to it in an even order (`planner.plan.token_order`).
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call: int
    inputs: tuple[str, ...]
    crossings: tuple[tuple[Crossing, ...], ...]
    outputs: tuple[str, ...]
    grad_enabled: bool = True
    is_zigzag: bool = False

    @property
    def target_name(self) -> str:
        """The op's name, as in ``aten.linear.default``."""
        if isinstance(self.target, torch._ops.OpOverload):
            return overload_name(self.target)
        return str(getattr(self.target, "__name__", self.target))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """An input of the root module: its value and the argument that it comes as."""

    value: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """An output of the root module; ``is_loss`` marks the scalar that training differentiates.

    ``is_sent`` marks what a pipeline stage hands to the next, which sends its gradient back; ``is_result`` what a
    forward that is not differentiated is run for, which leaves the model as whole values or pieces of them, not sums.
    """

    value: str
    path: str
    crossings: tuple[Crossing, ...]
    is_loss: bool
    is_sent: bool = False
    is_result: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """A traced model. ``digraph``, made by `build_digraph`, has ops as nodes and one edge per tensor (``value``)."""

    digraph: nx.MultiDiGraph[str]
    values: Mapping[str, Value]
    calls: tuple[Call, ...]
    inputs: tuple[ModelInput, ...]
    outputs: tuple[ModelOutput, ...]
    parameters: Mapping[str, tuple[str, ...]]
    """Parameter value -> every FQN that it goes by (more than one where it is tied)."""

    @property
    def ops(self) -> list[Op]:
        """Every op, in the order of execution."""
        ops: list[Op] = self.digraph.graph["ops"]
        return ops


def build_digraph(ops: list[Op]) -> nx.MultiDiGraph[str]:
    """Return the graph of ``ops``: nodes in order of execution, an edge for every tensor that one hands to another."""
    graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(ops=ops)
    produced: dict[str, str] = {}
    for op in ops:
        graph.add_node(op.name, op=op)
        for value in op.inputs:
            if value in produced:
                graph.add_edge(produced[value], op.name, value=value)
        produced.update(dict.fromkeys(op.outputs, op.name))
    return graph


def later_uses(graph: OpGraph) -> dict[str, tuple[int, ...]]:
    """Return op -> those of its inputs that need gradients and have been used before."""
    used: set[str] = set()
    found = {}
    for op in graph.ops:
        backward = any(graph.values[name].requires_grad for name in op.outputs)
        again = []
        for position, name in enumerate(op.inputs):
            if backward and graph.values[name].requires_grad:
                if name in used:
                    again.append(position)
                used.add(name)
        found[op.name] = tuple(again)
    return found


def leaves_of(template: Any) -> list[Any]:
    """Return what is no tuple, list or mapping in an argument template, in order."""
    found: list[Any] = []
    _collect(template, found)
    return found


_LEAVES = frozenset({Ref, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
"""Types that hold nothing else, told by a look: that something is no mapping takes long to see."""


def _collect(template: Any, into: list[Any]) -> None:
    if type(template) in _LEAVES:
        into.append(template)
    elif isinstance(template, (tuple, list)):
        for part in template:
            _collect(part, into)
    elif isinstance(template, Mapping):
        for part in template.values():
            _collect(part, into)
    else:
        into.append(template)


def with_refs(template: Any, substitute: Callable[[Ref], Any]) -> Any:
    """Return an argument template with what ``substitute`` returns in place of each `Ref`, in order."""
    if type(template) in _LEAVES:
        return substitute(template) if isinstance(template, Ref) else template
    if isinstance(template, (tuple, list)):
        return type(template)([with_refs(part, substitute) for part in template])
    if isinstance(template, Mapping):
        return {key: with_refs(part, substitute) for key, part in template.items()}
    return template


def _scaled(item: Any, traced_batch: int, batch: int) -> Any:
    """Return a shape, size or argument seen at ``traced_batch`` as it is at ``batch``."""
    if isinstance(item, (tuple, list)):
        return type(item)(_scaled(part, traced_batch, batch) for part in item)
    if isinstance(item, Mapping):
        return {key: _scaled(part, traced_batch, batch) for key, part in item.items()}
    if isinstance(item, int) and not isinstance(item, bool) and item > 0 and item % traced_batch == 0:
        return item // traced_batch * batch
    return item


def at_batch(graph: OpGraph, traced_batch: int, batch: int) -> OpGraph:
    """Return ``graph``, traced at a batch of ``traced_batch``, as it would be traced at ``batch``.

    Args:
        traced_batch: a prime that no other size of the model is a multiple of, so that whatever is a multiple of it is
        a
            multiple of the batch. No other number of micro-batches then needs a trace of its own.
    """
    ops = [
        replace(op, args=_scaled(op.args, traced_batch, batch), kwargs=_scaled(dict(op.kwargs), traced_batch, batch))
        for op in graph.ops
    ]
    values = {
        name: replace(value, shape=_scaled(value.shape, traced_batch, batch)) for name, value in graph.values.items()
    }
    return replace(graph, digraph=build_digraph(ops), values=values)
