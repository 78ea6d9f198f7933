"""Execution of one op of a graph on given tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from planner.graph.op_graph import Op, with_refs


def functional_target(target: Any) -> Any:
    """Return the out-of-place variant of an in-place aten op (``add_`` -> ``add``); other targets unchanged."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return target
    name = target._overloadpacket.__name__
    if not name.endswith("_") or name.endswith("__"):
        return target
    if name == "copy_":
        return _copied
    functional = getattr(torch.ops.aten, name[:-1], None)
    return getattr(functional, target._overloadname, target) if functional is not None else target


def _copied(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return tensor.detach().clone().copy_(source, non_blocking)  # aten.copy has no backward, and DTensor no rule for it


def with_tensors(template: Any, tensors: Iterable[Any]) -> Any:
    """Return an argument template with its ``Ref``s replaced by ``tensors``, in order of appearance."""
    remaining = iter(tensors)
    return with_refs(template, lambda _: next(remaining))


def run_op(op: Op, tensors: list[torch.Tensor], *, functional: bool = False) -> Any:
    """Return the result of ``op`` on ``tensors``, its inputs in order.

    Args:
        op: the op.
        tensors: in the order of ``op.inputs``.
        functional: whether an in-place op is replaced by its out-of-place variant.
    """
    args, kwargs = with_tensors((op.args, dict(op.kwargs)), tensors)
    kwargs = _on_meta(kwargs)
    target = functional_target(op.target) if functional else op.target
    with torch.set_grad_enabled(op.grad_enabled and torch.is_grad_enabled()):
        return target(*args, **kwargs)


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: torch.device("meta") if isinstance(value, torch.device) else value for key, value in kwargs.items()}
