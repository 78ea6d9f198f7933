"""`calls_as_ops`: the calls that a trace has as other ops, as a planned run has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from cost_model.layouts.mended_torch import mend_torch
from planner.model_rewrites.replaced_calls.assignments import assignments_as_ops
from planner.model_rewrites.replaced_calls.finite_branches import numbers_are_finite
from planner.model_rewrites.replaced_calls.other_ops import other_ops
from planner.model_rewrites.replaced_calls.value_checks import checks_pass, without_value_checks

mend_torch()  # a trace runs on the meta device


@contextmanager
def without_autocast_off() -> Iterator[None]:
    """Within this context, ``torch.autocast(..., enabled=False)`` does nothing, as it does where autocast is not on."""
    enter: Any = torch.autocast.__enter__
    leave: Any = torch.autocast.__exit__

    def entered(self: Any) -> Any:
        return enter(self) if self._enabled else self

    def left(self: Any, *error: Any) -> Any:
        return leave(self, *error) if self._enabled else None

    with (
        mock.patch.object(torch.autocast, "__enter__", entered),
        mock.patch.object(torch.autocast, "__exit__", left),
    ):
        yield


_COMPARISONS = ("ge", "gt", "le", "lt")
_REDUCTIONS = ("max", "min", "amax", "amin", "any", "all")


def without_checks(graph: Any) -> Any:
    """Remove from a captured graph what only a check of values read: a reduction, and its comparison with a number.

    In a run no rank waits for the others to make them (`executor.ops.reductions.compared`).
    """
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "_overloadpacket", None)
        if node.users or name is None or name.__name__ not in (*_COMPARISONS, *_REDUCTIONS):
            continue
        read = node.all_input_nodes
        is_scalar = not node.meta["val"].dim() if isinstance(node.meta.get("val"), torch.Tensor) else False
        if is_scalar and len(read) == 1:
            graph.erase_node(node)
    return graph


_REPLACED = (other_ops, without_value_checks, checks_pass, numbers_are_finite, assignments_as_ops, without_autocast_off)


@contextmanager
def calls_as_ops() -> Iterator[None]:
    """Within this context, calls are ops that have rules, checks of values pass, and autocast off leaves no trace.

    Numbers are finite, as far as a branch asks.
    """
    with ExitStack() as stack:
        for replaced in _REPLACED:
            stack.enter_context(replaced())
        yield
