"""torch's key-value stores, which are part of its private API except in the calls that take one."""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d

__all__ = ["HashStore", "PrefixStore", "Store", "default_store", "put"]


def default_store() -> Store:
    """Return the store of the default process group, which is initialised."""
    return distributed_c10d._get_default_store()


def put(store: Store, key: str, value: bytes) -> None:
    """Set ``key`` of ``store`` to ``value``: torch takes bytes, and declares text."""
    store.set(key, value)  # type: ignore[arg-type]
