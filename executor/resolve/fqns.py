"""Modules, arguments and tensors, looked up by the names that a plan has for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TypeVar

from torch import nn

T = TypeVar("T")


def modules_at(root: nn.Module, by_fqn: Mapping[str, T]) -> Iterator[tuple[nn.Module, str, T]]:
    """Yield (module, FQN, value) for each module that ``by_fqn`` names, once, under the first of its names."""
    modules: set[nn.Module] = set()
    for fqn, value in by_fqn.items():
        module = root.get_submodule(fqn)
        if module not in modules:
            modules.add(module)
            yield module, fqn, value


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of ``module.forward`` that can be passed by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, item in inspect.signature(module.forward).parameters.items() if item.kind in kinds)
