"""Linear layers that read the same tensor, and add up its gradient in their products: see `executor.op_linear`."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from planner.graph import OpGraph, later_uses
from planner.regions import block_of

_LINEAR = "aten.linear.default"


class Joins(NamedTuple):
    """What a graph's linear layers join.

    Attributes:
        joined: ops whose product adds to the gradient of their first input that later ones have left.
        alone: those of them where nothing else reads that input: no other gradient of it waits meanwhile.
        summed: op -> those of its inputs whose gradient autograd adds to that of an earlier use; layers that join are
            one use.
    """

    joined: frozenset[str]
    alone: frozenset[str]
    summed: dict[str, tuple[int, ...]]


def joins_of(graph: OpGraph) -> Joins:
    """Return what the linear layers of ``graph`` join, block by block: a block that runs again reads tensors anew."""
    readers: dict[tuple[str | None, str], list[str]] = defaultdict(list)
    uses: dict[str, int] = defaultdict(int)
    for op in graph.ops:
        for name in op.inputs:
            uses[name] += any(graph.values[output].requires_grad for output in op.outputs)
        value = graph.values[op.inputs[0]] if op.inputs else None
        if op.target_name == _LINEAR and value is not None and value.requires_grad and value.kind != "input":
            readers[block_of(graph.calls[op.call].fqn), value.name].append(op.name)
    joined = {name for ops in readers.values() for name in ops[:-1]}
    alone = {name for (_, value), ops in readers.items() if uses[value] == len(ops) for name in ops[:-1]}
    followers = {name for ops in readers.values() for name in ops[1:]}
    summed = {
        name: tuple(position for position in positions if position or name not in followers)
        for name, positions in later_uses(graph).items()
    }
    return Joins(frozenset(joined), frozenset(alone), summed)
