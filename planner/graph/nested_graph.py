"""Ops that a graph runs as one: what a ``torch.no_grad()`` block in a forward is captured as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner.graph.op_graph import Ref

META = torch.device("meta")
"""Where all that a graph makes lies, whatever device its forward named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedOp:
    """One op of a body: ``target`` applied to ``args`` and ``kwargs``, in which ``Ref`` stands for what is known there.

    Attributes:
        name: of the result, for later steps and the body's outputs.
        target: the op; None takes the item ``args[1]`` of ``args[0]``, which an earlier step returned several of.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, known: Mapping[str, Any]) -> Any:
        """Return what the op returns, given the values that it refers to."""
        args, kwargs = filled((self.args, dict(self.kwargs)), known)
        if self.target is None:
            return args[0][args[1]]
        on_meta = {key: META if isinstance(value, torch.device) else value for key, value in kwargs.items()}
        return self.target(*args, **on_meta)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NestedGraph:
    """A callable made of ops: an op's target like any other, but plain data, which can be written down and sent."""

    inputs: tuple[str, ...]
    steps: tuple[NestedOp, ...]
    outputs: Any
    code: str = field(init=False)
    """What the body does, as text: equal for bodies that do the same under the same names."""

    def __post_init__(self) -> None:
        lines = [f"body({', '.join(self.inputs)}):"]
        lines += [f"  {s.name} = {s.target or 'item'}{s.args!r} {dict(s.kwargs)!r}" for s in self.steps]
        object.__setattr__(self, "code", "\n".join([*lines, f"  return {self.outputs!r}"]))

    def __call__(self, *tensors: Any) -> Any:
        """Return what the steps make of ``tensors``."""
        if len(tensors) != len(self.inputs):
            raise TypeError(f"a body of {len(self.inputs)} inputs was given {len(tensors)}")
        known: dict[str, Any] = dict(zip(self.inputs, tensors, strict=True))
        for step in self.steps:
            known[step.name] = step.run(known)
        return filled(self.outputs, known)

    def __str__(self) -> str:
        return self.code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NestedGraph) and self.code == other.code

    def __hash__(self) -> int:
        return hash(self.code)


def filled(template: Any, known: Mapping[str, Any]) -> Any:
    """Return ``template`` with what each ``Ref`` in it stands for."""

    def substitute(leaf: Any) -> Any:
        return known[leaf.value] if isinstance(leaf, Ref) else leaf

    return pytree.tree_map(substitute, template, is_leaf=lambda leaf: isinstance(leaf, Ref))


def names_in(template: Any) -> Sequence[str]:
    """Return what the ``Ref``s in ``template`` stand for, in order of appearance."""
    leaves = pytree.tree_leaves(template, is_leaf=lambda leaf: isinstance(leaf, Ref))
    return [leaf.value for leaf in leaves if isinstance(leaf, Ref)]
