"""Internals of torch that ``torch.compile`` of modules touches, to be checked with each new version of torch.

Checked with torch 2.13: ``Module._call_impl``, which a call of a module and of a compiled module runs, and
``Module._compiled_call_impl``, which ``Module.compile`` sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def call_eagerly(module: nn.Module, reason: str, notice: Callable[[], None]) -> None:
    """Make dynamo leave ``module`` and all that it calls alone.

    Args:
        module: it stays the same object.
        reason: what torch says where a graph break is an error.
        notice: called when dynamo meets the module.
    """
    module._call_impl = _EagerCall(module._call_impl, reason, notice)  # type: ignore[method-assign]


class _EagerCall:
    """``Module._call_impl`` of one module, which dynamo does not enter. A copy of the module has a copy of it."""

    def __init__(self, call: Callable[..., Any], reason: str, notice: Callable[[], None]) -> None:
        self._call, self._notice = call, notice
        self._disabled = torch.compiler.disable(_run, reason=reason)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._disabled(self._call, self._notice, torch.compiler.is_compiling(), args, kwargs)


def _run(
    call: Callable[..., Any],
    notice: Callable[[], None],
    is_compiling: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if is_compiling:
        notice()
    return call(*args, **kwargs)


def compiled_parts(module: nn.Module) -> list[str]:
    """Return the FQNs of the submodules of ``module`` on which ``compile`` was called."""
    return [name for name, part in module.named_modules() if name and part._compiled_call_impl is not None]
