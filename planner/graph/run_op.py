"""Runs one op of a graph on tensors, in place or out of place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from planner.graph.op_graph import Op, Ref, with_refs


def functional_target(target: Any) -> Any:
    """Return the out-of-place variant of an in-place aten op (``add_`` -> ``add``), other targets as they are."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return target
    packet = target._overloadpacket
    name = packet.__name__
    if not name.endswith("_") or name.endswith("__"):
        return target
    functional = getattr(torch.ops.aten, name[:-1], None)
    return getattr(functional, target._overloadname, target) if functional is not None else target


def fill(template: Any, tensors: Mapping[str, Any] | list[Any]) -> Any:
    """Return an argument template with its ``Ref`` leaves replaced: by name, or in order of appearance."""
    remaining = iter(tensors) if isinstance(tensors, list) else None

    def substitute(ref: Ref) -> Any:
        return next(remaining) if remaining is not None else tensors[ref.value]  # type: ignore[call-overload]

    return with_refs(template, substitute)


def run_op(op: Op, tensors: list[torch.Tensor], *, functional: bool = False) -> Any:
    """Run ``op`` on ``tensors``, which stand for its inputs in order."""
    args, kwargs = fill((op.args, dict(op.kwargs)), list(tensors))
    kwargs = _on_meta(kwargs)
    target = functional_target(op.target) if functional else op.target
    with torch.set_grad_enabled(op.grad_enabled and torch.is_grad_enabled()):
        return target(*args, **kwargs)


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: torch.device("meta") if isinstance(value, torch.device) else value for key, value in kwargs.items()}
