"""Tensors among a module's arguments and results, by the names that a plan has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from executor.resolve.fqns import path_text

T = TypeVar("T")


def changed_arguments(
    wanted: Mapping[str, T],
    names: Sequence[str],
    change: Callable[[Any, T, str], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments with ``change(argument, what is wanted of it, its name)`` in place of some.

    Args:
        wanted: by position or keyword, with dots into nested arguments; "" is the first.
        names: of the arguments that may be passed by position.
    """
    first = "0" if args else next(iter(kwargs), "0")
    by_name = {name or first: item for name, item in wanted.items()}

    def found(path: tuple[Any, ...], leaf: Any) -> Any:
        head, *rest = (path_text((key,)) for key in path[1:])
        by_position = path[0] == pytree.SequenceKey(0)
        aliases = [head]
        if by_position and int(head) < len(names):
            aliases.append(names[int(head)])
        elif not by_position and head in names:
            aliases.append(str(names.index(head)))
        for alias in aliases:
            item = by_name.get(".".join((alias, *rest)))
            if item is not None:
                return change(leaf, item, alias)
        return leaf

    changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_with_path(found, (args, kwargs))
    return changed


def changed_results(
    wanted: Mapping[str, T], change: Callable[[Any, T, str], Any], output: Any
) -> tuple[Any, frozenset[str]]:
    """Return a module's results likewise, and which names were met.

    Args:
        wanted: by position or key, with dots into nested results; "" is the only tensor.
    """
    met: set[str] = set()
    lone = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(output)) == 1

    def found(path: tuple[Any, ...], leaf: Any) -> Any:
        text = path_text(path)
        # A lone tensor is also the first of a list.
        spellings = [text] if text else ["", "0"]
        if lone and isinstance(leaf, torch.Tensor):
            spellings.append("")
        for name in spellings:
            if name in wanted:
                met.add(name)
                return change(leaf, wanted[name], name)
        return leaf

    return pytree.tree_map_with_path(found, output), frozenset(met)
