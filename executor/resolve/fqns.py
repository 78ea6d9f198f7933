"""Names: of submodules, of a forward's arguments, and of places in nested arguments, as plans write them."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from torch import nn


def module_fqns(module: nn.Module, *, opaque: Collection[nn.Module] = ()) -> list[str]:
    """Return every name of every submodule, "" for the root first; what is inside an ``opaque`` module has none."""
    named = dict(module.named_modules(remove_duplicate=False))
    hidden = [f"{fqn}." for fqn, submodule in named.items() if submodule in opaque]
    return [fqn for fqn in named if not any(fqn.startswith(prefix) for prefix in hidden)]


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters of ``module.forward`` that may be passed by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, item in inspect.signature(module.forward).parameters.items() if item.kind in kinds]


def path_text(path: tuple[Any, ...]) -> str:
    """Return a pytree path as the plan writes it: keys, indices and attribute names joined by dots."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
