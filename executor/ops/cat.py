"""Concatenation that skips empty plain tensors, as the first update of a key-value cache needs.

transformers starts a layer's cache with an empty plain tensor of one dim, which torch skips and DTensor does not.
DTensor runs all other concatenations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from executor.redistribute import Redistributor


def concatenate(redistributor: Redistributor, tensors: Sequence[torch.Tensor], *args: Any, **options: Any) -> Any:
    """Return ``tensors`` concatenated without its empty plain tensors; NotImplemented if it has no such tensor."""
    if "out" in options or not isinstance(tensors, (list, tuple)):
        return NotImplemented
    nonempty = [tensor for tensor in tensors if isinstance(tensor, DTensor) or tuple(tensor.shape) != (0,)]
    return NotImplemented if len(nonempty) == len(tensors) else torch.cat(nonempty, *args, **options)
