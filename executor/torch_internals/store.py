"""torch's key-value stores, which are part of its private API except in the calls that take one. Checked with 2.13."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d

__all__ = ["HashStore", "PrefixStore", "Store", "default_store", "put", "timeout_s_of"]


def default_store() -> Store | None:
    """Return the store through which the default process group was made; None: there is no group, or a fake one."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return distributed_c10d._get_default_store()


def put(store: Store, key: str, value: bytes) -> None:
    """Set ``key`` of ``store`` to ``value``: torch takes bytes, and declares text."""
    store.set(key, value)  # type: ignore[arg-type]


def timeout_s_of(store: Store) -> float:
    """Return the time limit of ``store``'s requests in seconds, which is that of its process group."""
    return float(store.timeout.total_seconds())  # type: ignore[attr-defined]
