"""A copy of a partial tensor stays partial.

torch 2.13 has two rules for ``aten.clone``: the one written for it, which keeps the placements, and a later one that
every op with the tag ``pointwise`` gets, which reduces partial tensors first. The later one wins. Autograd copies a
gradient that is not contiguous before it views it, so each weight that is viewed and then transposed would have its
gradient reduced in every backward. No rule for the op, nor any trace of the forward, shows that copy.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def keep_partial_in_clones() -> None:
    """Leave ``aten.clone`` the rule that was written for it, in this process."""
    rules = DTensor._op_dispatcher.sharding_propagator
    if torch.ops.aten.clone.default in rules.op_strategy_funcs:
        rules.op_single_dim_strategy_funcs.pop(torch.ops.aten.clone.default, None)
