"""`trace_with_opaque`: traces a model in which some modules cannot be traced: each of their calls becomes one op."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from enum import Enum

from torch import nn

from planner.errors import ModelError
from planner.graph.capture import ExampleInputs
from planner.graph.op_graph import OpGraph
from planner.graph.opaque_calls import opaque_calls
from planner.graph.trace_errors import called_from_outside, cannot_run
from planner.model_rewrites.opaque_op import opaque_as_one_op
from planner.model_rewrites.selected_rows.trace import is_in_list, masks_keep_all
from planner.plan.patterns import resolve_keys

_MOST_TRIES = 8


def trace_with_opaque(
    module: nn.Module,
    inputs: ExampleInputs,
    samples: int,
    batch: int,
    trace: Callable[[], OpGraph],
    *,
    named: Mapping[str, str] | None = None,
    error: ModelError | None = None,
) -> OpGraph:
    """Return the graph of ``module``, with the modules that cannot be traced as opaque modules.

    A module that fails, and those like it, become opaque; where their results cannot be traced either, the module
    around them does. Before a module becomes opaque that is in no list, such as the root, the trace keeps all elements
    that its masks select from (`planner.model_rewrites.selected_rows`).

    Args:
        module: on the meta device.
        inputs: arguments of one call.
        samples: samples in ``inputs``.
        batch: samples at which the model is traced.
        trace: traces ``module``.
        named: FQN of a module that is opaque in any case -> why (`ModelError.cause`); "" if the user named it.
        error: the error of the trace with the ``named`` modules alone, if it has failed.

    Raises:
        ModelError: ``error``, or the error of the first trace, where there is no way out.
    """
    opaque, masks = dict(named or {}), _Masks.UNTRIED
    latest = error
    failing = None if error is None else error.module
    measured: set[str] | None = None
    for _ in range(_MOST_TRIES):
        if error is not None:
            if failing is None:
                break
            if not is_in_list(failing) and masks is _Masks.UNTRIED:
                masks = _Masks.KEEP_ALL
            else:
                masks = masks if is_in_list(failing) else _Masks.SELECT
                before = opaque
                names = _with_module(module, set(opaque), failing)
                cause = latest.cause if latest is not None else ""
                opaque = {name: opaque.get(name, cause) for name in names}
                if opaque.keys() == before.keys():
                    break
        try:
            causes = {module.get_submodule(name): cause for name, cause in opaque.items()}
            if opaque.keys() != measured:
                calls, measured = opaque_calls(module, causes.keys(), inputs, samples, batch), set(opaque)
            with opaque_as_one_op(calls, causes), masks_keep_all(module) if masks is _Masks.KEEP_ALL else nullcontext():
                graph = trace()
            entered = next((name for name in opaque if _runs_inside(graph, name)), None)
            if entered is None:
                return graph
            latest = called_from_outside(entered)
            error = error or latest
            failing = _around(entered)
        except ModelError as again:
            latest = again
            error = error or again
            failing = again.module if again.module is not None else _around(failing)
        except Exception as again:  # noqa: BLE001  whatever the forward raises without values: the module around it may run
            latest = cannot_run(module, again)
            error = error or latest
            failing = _around(failing)
    assert error is not None
    raise error


class _Masks(Enum):
    """What the elements that a mask selects are in a trace: as many as the mask says, or all."""

    UNTRIED = "untried"
    KEEP_ALL = "keep all"
    SELECT = "select"


def _with_module(module: nn.Module, opaque: set[str], failing: str) -> set[str]:
    """Return ``opaque`` with the module ``failing`` and those like it; with one around them if it is in there.

    An opaque module around ``failing`` is one that is never called itself, but whose methods are.
    """
    while failing and any(failing == name or _is_in(failing, name) for name in opaque):
        failing = failing.rpartition(".")[0]
    kind, pattern = type(module.get_submodule(failing)), _pattern(failing)
    alike = {name for name, part in module.named_modules() if type(part) is kind and _pattern(name) == pattern}
    names = opaque | alike
    return {name for name in names if not any(_is_in(name, other) for other in names)}


def _runs_inside(graph: OpGraph, name: str) -> bool:
    """Return whether a module inside the opaque module ``name`` is called from outside of it."""
    return any(_is_in(graph.calls[op.call].fqn, name) for op in graph.ops)


def _pattern(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _is_in(name: str, other: str) -> bool:
    """Return whether the module ``name`` is inside the module ``other``."""
    return name != other and (not other or name.startswith(f"{other}."))


def _around(name: str | None) -> str | None:
    """Return the module around ``name``; None for the root."""
    return name.rpartition(".")[0] if name else None


def opaque_names(module: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """Return FQN -> cause of the modules that ``patterns`` name, which have causes; of nested modules, the outer one.

    Raises:
        UnmatchedKeyError: a pattern that no module matches.
    """
    modules = dict(module.named_modules())
    causes = resolve_keys(patterns, modules, field="opaque_modules", what="module")
    return {name: cause for name, cause in causes.items() if not any(_is_in(name, other) for other in causes)}
