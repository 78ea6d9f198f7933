"""How many bytes an op has alive at once, forward and backward, seen on meta tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.graph import Op
from planner.strategies.dtensor_rules import run_op


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that ops inside it make, and takes them off as they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def know(self, tensor: torch.Tensor) -> None:
        """Leave a tensor's storage out of the count."""
        self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def forward_peak(op: Op, inputs: Sequence[torch.Tensor]) -> int:
    """Return the most bytes that the forward of ``op`` has alive at once, beside its inputs, on meta."""
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    with _LiveBytes() as live:
        for leaf in leaves:
            live.know(leaf)
        run_op(op, leaves)
    return int(live.peak)


def backward_rise(op: Op, inputs: Sequence[torch.Tensor]) -> int:
    """Return by how many bytes the backward of ``op`` rises above what was there before it and the gradients it leaves.

    Args:
        inputs: on meta; those that need gradients have them computed.
    """
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with _LiveBytes() as live:
        for leaf in leaves:
            live.know(leaf)
        results = [r for r in pytree.tree_leaves(run_op(op, leaves)) if isinstance(r, torch.Tensor) and r.requires_grad]
        if not wanted or not results:
            return 0
        arriving = [torch.empty_like(result) for result in results]
        del results[1:]
        before = live.now
        live.peak = before
        gradients = torch.autograd.grad(results, wanted, arriving[:1], allow_unused=True)
        left = {g.untyped_storage()._cdata: g.untyped_storage().nbytes() for g in gradients if g is not None}
        given = {a.untyped_storage()._cdata for a in arriving}
        remaining = sum(int(nbytes) for key, nbytes in left.items() if key not in given)
        return int(live.peak - before) - remaining
