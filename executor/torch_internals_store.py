"""torch's private names for the store of the default process group. Checked with torch 2.13."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

__all__ = ["Store", "default_store"]


def default_store() -> Store | None:
    """Return the store through which the default process group was made; None: there is no group, or a fake one."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return distributed_c10d._get_default_store()
