"""Paths of tensors in the arguments and results of modules."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def path_text(path: tuple[Any, ...]) -> str:
    """Return a pytree path as text: keys, indices and attribute names joined by dots (``position_embeddings.0``)."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def tensors_by_path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return path -> tensor of all tensors in the arguments of a call, in order."""
    leaves = [*pytree.tree_leaves_with_path(args), *pytree.tree_leaves_with_path(kwargs)]
    return {path_text(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in ``tree``, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
