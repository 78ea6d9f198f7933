"""Cache keys of ops on meta tensors. Ops with equal keys have equal results, so only the first of them has to run."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch


@functools.cache
def returns_one_new_tensor(op: Any) -> bool:
    """Return whether an op changes none of its arguments and returns one tensor that aliases none of them."""
    returns = op._schema.returns
    is_tensor = len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None
    return is_tensor and not op._schema.is_mutable


def selects_by_values(op: Any, dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether an op, on tensors of these dtypes, returns as many elements as their values say.

    torch.export takes their number to be what other tensors ask for, where it is added to one of a known size.
    """
    if torch.Tag.dynamic_output_shape not in getattr(op, "tags", ()):
        return False
    return op is not torch.ops.aten.index.Tensor or torch.bool in dtypes[1:]


def argument_key(tree: Any) -> Hashable:
    """Return a cache key of an op's arguments: the metadata of tensors, and the values of all other arguments."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype, tree.device, tree.storage_offset(), type(tree)
    if isinstance(tree, (tuple, list)):
        return tuple([argument_key(part) for part in tree])
    if isinstance(tree, dict):
        return tuple([(key, argument_key(part)) for key, part in tree.items()])
    return type(tree), tree if isinstance(tree, Hashable) else repr(tree)
