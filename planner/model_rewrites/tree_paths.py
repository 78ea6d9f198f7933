"""Paths of tensors in the arguments and results of modules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def path_text(path: tuple[Any, ...]) -> str:
    """Return a pytree path as text: keys, indices and attribute names joined by dots (``position_embeddings.0``)."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def look_into_dataclasses(*trees: Any) -> None:
    """Make pytree look into the dataclasses of objects in ``trees`` that hold tensors, as into a dict.

    torch itself looks only into those classes that were registered with it, some of them without names for their parts,
    such as the outputs of diffusers.
    """
    _name_parts(len(pytree.SUPPORTED_NODES))
    while True:
        unknown = {type(leaf) for leaf in pytree.tree_leaves(trees) if _is_dataclass_with_tensors(leaf)}
        if not unknown:
            return
        for kind in unknown:
            _register(kind)


@functools.cache
def _name_parts(registered: int) -> None:
    """Let the paths of pytree name the parts of each of the ``registered`` classes, by keys or else by numbers."""
    for kind, node in list(pytree.SUPPORTED_NODES.items()):
        if node.flatten_with_keys_fn is None:
            pytree.SUPPORTED_NODES[kind] = node._replace(flatten_with_keys_fn=_with_keys(node.flatten_fn))


def _with_keys(flatten: pytree.FlattenFunc) -> pytree.FlattenWithKeysFunc:
    def flatten_with_keys(instance: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
        values, context = flatten(instance)
        has_keys = isinstance(instance, Mapping) and len(instance) == len(values)
        keys: list[Any] = [*map(pytree.MappingKey, instance)] if has_keys else []
        return list(zip(keys or map(pytree.SequenceKey, range(len(values))), values, strict=True)), context

    return flatten_with_keys


def _is_dataclass_with_tensors(leaf: Any) -> bool:
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, (type, torch.Tensor, torch.nn.Module)):
        return False
    names = [field.name for field in dataclasses.fields(leaf)]
    if set(getattr(leaf, "__dict__", names)) - set(names):
        return False  # what it has beside its fields would be lost
    values = pytree.tree_leaves([getattr(leaf, name, None) for name in names])
    return any(isinstance(value, torch.Tensor) or _is_dataclass_with_tensors(value) for value in values)


def _register(kind: type) -> None:
    names = [field.name for field in dataclasses.fields(kind)]

    def flatten(instance: Any) -> tuple[list[Any], None]:
        return [getattr(instance, name) for name in names], None

    def flatten_with_keys(instance: Any) -> tuple[list[tuple[Any, Any]], None]:
        return [(pytree.GetAttrKey(name), getattr(instance, name)) for name in names], None

    def unflatten(values: Any, context: None) -> Any:
        instance: Any = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(instance, name, value)  # a frozen dataclass has no other way
        return instance

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
    )


def tensors_by_path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return path -> tensor of all tensors in the arguments of a call, in order."""
    leaves = [*pytree.tree_leaves_with_path(args), *pytree.tree_leaves_with_path(kwargs)]
    return {path_text(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


_LEAVES = frozenset(
    {torch.Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}
)
"""Types of most arguments of ops that pytree does not look into."""


def leaves_in(tree: Any) -> list[Any]:
    """Return what ``pytree.tree_leaves`` returns, in a quarter of the time for the arguments of most ops."""
    found: list[Any] = []
    _add_leaves(tree, found)
    return found


def _add_leaves(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind in _LEAVES or isinstance(tree, torch.Tensor):
        found.append(tree)
    elif kind is tuple or kind is list:
        for part in tree:
            _add_leaves(part, found)
    elif kind is dict:
        for part in tree.values():
            _add_leaves(part, found)
    else:
        found += pytree.tree_leaves(tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in ``tree``, in order."""
    return [leaf for leaf in leaves_in(tree) if isinstance(leaf, torch.Tensor)]


def computed_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return the attributes of ``module`` and its submodules that are results of ops, which ``deepcopy`` refuses.

    The weight of `torch.nn.utils.weight_norm` is one: it is computed anew before each call.
    """
    values = (value for part in module.modules() for value in vars(part).values())
    return [value for value in values if isinstance(value, torch.Tensor) and not value.is_leaf]
