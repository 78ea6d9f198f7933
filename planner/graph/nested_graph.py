"""Nested graphs: several ops that a graph runs as one op, without gradients.

torch.export captures the body of ``with torch.no_grad():`` as a submodule. `NestedGraph` is that submodule as plain
data, which `planner.wire` can write to JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from planner.graph.op_graph import Ref, leaves_of, scaled, with_refs

META = torch.device("meta")
"""The device of every tensor of a graph, whatever device the forward names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedOp:
    """One op of a nested graph: ``target`` applied to ``args`` and ``kwargs``, in which ``Ref`` names a value.

    Attributes:
        name: name of the result.
        target: the op; None stands for ``args[0][args[1]]``, which selects one result of an earlier op.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, values: Mapping[str, Any]) -> Any:
        """Return the result, given the nested graph's values by name."""
        args, kwargs = with_refs((self.args, dict(self.kwargs)), lambda ref: values[ref.value])
        if self.target is None:
            return args[0][args[1]]
        on_meta = {key: META if isinstance(value, torch.device) else value for key, value in kwargs.items()}
        return self.target(*args, **on_meta)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NestedGraph:
    """A callable that runs a list of ops; the target of an `Op`. Nested graphs with equal ``code`` are equal.

    Attributes:
        inputs: names of the arguments.
        ops: in the order of execution.
        outputs: the results, as a tree of ``Ref``s to values.
        code: the nested graph as text.
    """

    inputs: tuple[str, ...]
    ops: tuple[NestedOp, ...]
    outputs: Any
    code: str = field(init=False)

    def __post_init__(self) -> None:
        lines = [f"body({', '.join(self.inputs)}):"]
        lines += [f"  {op.name} = {op.target or 'item'}{op.args!r} {dict(op.kwargs)!r}" for op in self.ops]
        object.__setattr__(self, "code", "\n".join([*lines, f"  return {self.outputs!r}"]))

    def __call__(self, *tensors: Any) -> Any:
        """Return the outputs for the arguments ``tensors``."""
        if len(tensors) != len(self.inputs):
            raise TypeError(f"a nested graph of {len(self.inputs)} inputs is called with {len(tensors)}")
        values: dict[str, Any] = dict(zip(self.inputs, tensors, strict=True))
        for op in self.ops:
            values[op.name] = op.run(values)
        return with_refs(self.outputs, lambda ref: values[ref.value])

    def at_batch(self, traced_batch: int, batch: int) -> NestedGraph:
        """Return the graph as it would be captured at ``batch``; see `planner.graph.op_graph.at_batch`."""
        ops = tuple(
            replace(
                op,
                args=scaled(op.args, traced_batch, batch),
                kwargs=scaled(dict(op.kwargs), traced_batch, batch),
            )
            for op in self.ops
        )
        return replace(self, ops=ops)

    def __str__(self) -> str:
        return self.code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NestedGraph) and self.code == other.code

    def __hash__(self) -> int:
        return hash(self.code)


def referenced_values(template: Any) -> Sequence[str]:
    """Return the names of the values that the ``Ref``s in ``template`` refer to, in order of appearance."""
    return [leaf.value for leaf in leaves_of(template) if isinstance(leaf, Ref)]
