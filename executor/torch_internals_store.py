"""The part of torch's private API that ranks need which exchange values without collectives."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d


def default_store() -> dist.Store:
    """Return the store of the default process group, which is initialised."""
    store: dist.Store = distributed_c10d._get_default_store()
    return store
