"""What ops on meta tensors, which have no values, depend on: so that of equal ones the first alone has to run."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch


@functools.cache
def makes_one_tensor(func: Any) -> bool:
    """Tell whether an op changes none of its arguments and returns one tensor in memory of its own."""
    returns = func._schema.returns
    is_tensor = len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None
    return is_tensor and not func._schema.is_mutable


def seen_on_meta(tree: Any) -> Hashable:
    """Return what an op on meta tensors can see of its arguments."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype, tree.device, tree.storage_offset(), type(tree)
    if isinstance(tree, (tuple, list)):
        return tuple([seen_on_meta(part) for part in tree])
    if isinstance(tree, dict):
        return tuple([(key, seen_on_meta(part)) for key, part in tree.items()])
    return type(tree), tree if isinstance(tree, Hashable) else repr(tree)
