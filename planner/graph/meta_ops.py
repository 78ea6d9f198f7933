"""Cache keys of ops on meta tensors: equal keys give equal results, so that only the first of equal ops has to run."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch


@functools.cache
def returns_one_new_tensor(op: Any) -> bool:
    """Tell whether an op changes none of its arguments and returns one tensor that aliases none of them."""
    returns = op._schema.returns
    is_tensor = len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None
    return is_tensor and not op._schema.is_mutable


def argument_key(tree: Any) -> Hashable:
    """Return all that the result of an op on meta tensors can depend on: metadata of tensors, values of the rest."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype, tree.device, tree.storage_offset(), type(tree)
    if isinstance(tree, (tuple, list)):
        return tuple([argument_key(part) for part in tree])
    if isinstance(tree, dict):
        return tuple([(key, argument_key(part)) for key, part in tree.items()])
    return type(tree), tree if isinstance(tree, Hashable) else repr(tree)
