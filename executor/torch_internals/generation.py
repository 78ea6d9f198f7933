"""torch's private names that generation needs."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def start_fully_sharded(root: nn.Module) -> None:
    """Make ``root`` the root of its FSDP modules, as its first forward would, if it has any."""
    if isinstance(root, FSDPModule):
        root._get_fsdp_state()._lazy_init()
