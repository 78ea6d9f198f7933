"""`LiveBytesMode`: live bytes, and the ops that torch dispatches, as code runs on meta tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.counting.flop_count import FORMULAS
from planner.model_rewrites.tree_paths import tensors_in


class Dispatched(NamedTuple):
    """What torch dispatches in one pass of an op.

    Attributes:
        ops: number of dispatched ops, views included.
        nbytes: bytes that they read and write, matrix multiplications left out.
    """

    ops: int
    nbytes: int


NOTHING = Dispatched(0, 0)


class LiveBytesMode(TorchDispatchMode):
    """Counts the bytes of storages that are allocated inside it, until they are freed, and what is dispatched.

    Attributes:
        now: live bytes.
        peak: largest value of ``now``.
        ops: dispatched ops.
        moved_nbytes: bytes that they read and write.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.ops = 0
        self.moved_nbytes = 0
        self._storages: set[int] = set()

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave the storage of a tensor out of the count."""
        self._storages.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = tensors_in(out)
        for leaf in results:
            self._count(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        self.ops += 1
        self.moved_nbytes += _moved_nbytes(func, args, results)
        return out

    def dispatched(self, before: Dispatched = NOTHING) -> Dispatched:
        """Return what has been dispatched since ``before``."""
        return Dispatched(self.ops - before.ops, self.moved_nbytes - before.nbytes)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            self._storages.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, nbytes: int) -> None:
        self._storages.discard(key)
        self.now -= nbytes


def _moved_nbytes(func: Any, args: Any, results: Sequence[torch.Tensor]) -> int:
    """Return the bytes that one dispatched op reads and writes.

    0 for a view and for uninitialized memory, which move none, and for a GEMM, which is priced by its shape.
    """
    inputs = tensors_in(args)
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    is_view = bool(storages) and all(result.untyped_storage()._cdata in storages for result in results)
    if (is_view and not func._schema.is_mutable) or "empty" in func.name() or func._overloadpacket in FORMULAS:
        return 0
    # An expanded tensor is read as often as it is stored.
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*inputs, *results))
