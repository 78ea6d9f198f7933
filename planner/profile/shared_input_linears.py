"""Linear layers that read the same tensor, and add up its gradient in their products: see `joined_linears`."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from planner.graph.op_graph import OpGraph, later_uses
from planner.regions.regions import block_of

_LINEAR = "aten.linear.default"


class SharedInputs(NamedTuple):
    """Positions of an op's inputs whose gradient is added to that of another use; see `planner.profile.op_profile`."""

    summed: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()


def shared_inputs(graph: OpGraph, *, joins: bool) -> dict[str, SharedInputs]:
    """Return op -> those of its inputs that other ops read as well, of the ops that have any.

    Args:
        joins: whether linear layers join their inputs' gradients, block by block: a block that runs again reads tensors
            anew. Of several the first ones add to what the last has made, and all are one use.
    """
    joined, followers = _joined(graph) if joins else ({}, frozenset[str]())
    found = {}
    for name, positions in later_uses(graph).items():
        summed = tuple(position for position in positions if position or name not in followers)
        adds, alone = name in joined, joined.get(name, False)
        if summed or adds:
            found[name] = SharedInputs(summed, (0,) if adds else (), (0,) if alone else ())
    return found


def _joined(graph: OpGraph) -> tuple[dict[str, bool], frozenset[str]]:
    """Return the linear layers that add to a gradient that is there, and whether no other of that tensor waits
    meanwhile; and those that an earlier one joins."""
    readers: dict[tuple[str | None, str], list[str]] = defaultdict(list)
    uses: dict[str, int] = defaultdict(int)
    for op in graph.ops:
        for name in op.inputs:
            uses[name] += any(graph.values[output].requires_grad for output in op.outputs)
        value = graph.values[op.inputs[0]] if op.inputs else None
        if op.target_name == _LINEAR and value is not None and value.requires_grad and value.kind != "input":
            readers[block_of(graph.calls[op.call].fqn), value.name].append(op.name)
    joined = {name: uses[value] == len(ops) for (_, value), ops in readers.items() for name in ops[:-1]}
    return joined, frozenset(name for ops in readers.values() for name in ops[1:])
