"""Changes to the arguments and results of a module that a plan names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from planner.model_rewrites.tree_paths import look_into_dataclasses, path_text

T = TypeVar("T")

Change = Callable[[Any, T, str], Any]
"""(leaf, the plan's value for the leaf, name of the leaf) -> the object that replaces the leaf."""


def change_arguments(
    by_name: Mapping[str, T],
    positional: Sequence[str],
    change: Change[T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with ``change`` applied to those in ``by_name``.

    Args:
        by_name: position or keyword of an argument -> the plan's value for it. Dots lead into nested tuples, lists and
            dicts; "" is the first argument.
        positional: names of the arguments that can be passed by position.
        change: applied to each named leaf.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    first = "0" if args else next(iter(kwargs), "0")
    values = {name or first: value for name, value in by_name.items()}

    def change_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        head, *rest = (path_text((key,)) for key in path[1:])
        by_position = path[0] == pytree.SequenceKey(0)
        aliases = [head]
        if by_position and int(head) < len(positional):
            aliases.append(positional[int(head)])
        elif not by_position and head in positional:
            aliases.append(str(positional.index(head)))
        for alias in aliases:
            value = values.get(".".join((alias, *rest)))
            if value is not None:
                return change(leaf, value, alias)
        return leaf

    look_into_dataclasses(args, kwargs)
    changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_with_path(change_leaf, (args, kwargs))
    return changed


def change_results(by_name: Mapping[str, T], change: Change[T], output: Any) -> tuple[Any, frozenset[str]]:
    """Return a call's output with ``change`` applied to the results in ``by_name``, and the names that occur in it.

    Args:
        by_name: position or key of a result -> the plan's value for it. Dots lead into nested tuples, lists and dicts;
            "" is the only tensor.
        change: applied to each named leaf.
        output: the output of the call.
    """
    occurring: set[str] = set()
    look_into_dataclasses(output)
    is_only_tensor = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(output)) == 1

    def change_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        text = path_text(path)
        # A bare tensor is also result 0.
        names = [text] if text else ["", "0"]
        if is_only_tensor and isinstance(leaf, torch.Tensor):
            names.append("")
        for name in names:
            if name in by_name:
                occurring.add(name)
                return change(leaf, by_name[name], name)
        return leaf

    return pytree.tree_map_with_path(change_leaf, output), frozenset(occurring)
