"""Cache keys of ops on meta tensors. Ops with equal keys have equal results, so only the first of them has to run."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch


@functools.cache
def returns_one_new_tensor(op: Any) -> bool:
    """Return whether an op changes none of its arguments and returns one tensor that aliases none of them."""
    returns = op._schema.returns
    is_tensor = len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None
    return is_tensor and not op._schema.is_mutable


def argument_key(tree: Any) -> Hashable:
    """Return a cache key of an op's arguments: the metadata of tensors, and the values of all other arguments."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype, tree.device, tree.storage_offset(), type(tree)
    if isinstance(tree, (tuple, list)):
        return tuple([argument_key(part) for part in tree])
    if isinstance(tree, dict):
        return tuple([(key, argument_key(part)) for key, part in tree.items()])
    return type(tree), tree if isinstance(tree, Hashable) else repr(tree)
