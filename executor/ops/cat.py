"""What a key-value cache does to its keys and values: the first are put behind nothing, later ones behind those before.

transformers starts a layer's cache with an empty plain tensor of one dim, which torch leaves out of a concatenation and
DTensor does not. All else is DTensor's: pieces alike on every rank, of which none splits the dim of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from executor.redistribute import Redistributor


def concatenate(redistributor: Redistributor, tensors: Sequence[torch.Tensor], *args: Any, **options: Any) -> Any:
    """Return ``tensors`` in a row, empty plain ones left out; NotImplemented where there are none."""
    if "out" in options or not isinstance(tensors, (list, tuple)):
        return NotImplemented
    kept = [tensor for tensor in tensors if isinstance(tensor, DTensor) or tuple(tensor.shape) != (0,)]
    return NotImplemented if len(kept) == len(tensors) else torch.cat(kept, *args, **options)
