"""Whole tensors of a sharded module on rank 0, for loops that write their files from one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from executor.torch_internals.weights import reshard
from executor.weights.gather import whole_on_rank
from executor.weights.ranks import Ranks


def whole_state_dict(module: nn.Module, keep: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
    """Return the state dict of ``module`` as whole tensors on rank 0's CPU, and an empty one on other ranks.

    All ranks call this together. Tied parameters stay one tensor.

    Args:
        module: the module, after ``shard_module``, or peft's model around it.
        keep: whether an entry, by its name, is in the result.
    """
    reshard(module)
    ranks = Ranks(module)
    whole: dict[str, torch.Tensor] = {}
    gathered: dict[torch.Tensor, torch.Tensor | None] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not keep(name):
            continue
        if tensor not in gathered:
            gathered[tensor] = whole_on_rank(tensor, 0, ranks)
        on_rank_0 = gathered[tensor]
        if on_rank_0 is not None:
            whole[name] = on_rank_0
    return whole
