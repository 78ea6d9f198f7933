"""How many bytes an op has alive at once, and what it dispatches, forward and backward, seen on meta tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from planner.graph.op_graph import Op
from planner.graph.run_op import fill, run_op
from planner.model_rewrites.fused_kernels import run_backward, run_forward


class Dispatched(NamedTuple):
    """What a pass of an op dispatches, one by one: ``ops``, views included, and bytes that all but products move."""

    ops: int
    nbytes: int


class OpRun(NamedTuple):
    """What is seen of an op that runs forward and backward.

    Attributes:
        rise: bytes by which the backward rises above what was there before it and the gradients that it leaves.
        forward, backward: what each dispatches.
    """

    rise: int
    forward: Dispatched
    backward: Dispatched


NOTHING = Dispatched(0, 0)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that ops inside it make, and takes them off as they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.ops = 0
        self.moved = 0
        self._known: set[int] = set()

    def know(self, tensor: torch.Tensor) -> None:
        """Leave a tensor's storage out of the count."""
        self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for leaf in results:
            self._count(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        self.ops += 1
        self.moved += _moved(func, args, results)
        return out

    def dispatched(self, before: Dispatched = NOTHING) -> Dispatched:
        """Return what has been dispatched since ``before`` was."""
        return Dispatched(self.ops - before.ops, self.moved - before.nbytes)

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


def run_both_ways(op: Op, inputs: Sequence[torch.Tensor]) -> OpRun:
    """Return what is seen of ``op`` forward and backward.

    Args:
        inputs: on meta; those that need gradients have them computed.
    """
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with _LiveBytes() as live:
        for leaf in leaves:
            live.know(leaf)
        # Autograd forbids an op that writes in place to write to a leaf.
        returned = pytree.tree_leaves(run_op(op, leaves, functional=bool(wanted)))
        results = [r for r in returned if isinstance(r, torch.Tensor) and r.requires_grad]
        del returned
        forward = live.dispatched()
        if not wanted or not results:
            return OpRun(0, forward, NOTHING)
        arriving = [torch.empty_like(result) for result in results]
        del results[1:]
        before, forward_and_more = live.now, live.dispatched()
        live.peak = before
        gradients = torch.autograd.grad(results, wanted, arriving[:1], allow_unused=True)
        left = {g.untyped_storage()._cdata: g.untyped_storage().nbytes() for g in gradients if g is not None}
        given = {a.untyped_storage()._cdata for a in arriving}
        remaining = sum(int(nbytes) for key, nbytes in left.items() if key not in given)
        return OpRun(int(live.peak - before) - remaining, forward, live.dispatched(forward_and_more))


def run_fused(op: Op, inputs: Sequence[torch.Tensor]) -> OpRun:
    """Return what is seen of the formulas of one of `fused_kernels`, run step by step; ``inputs`` are on meta."""
    given = [tensor.detach() for tensor in inputs]
    args, _ = fill((op.args, dict(op.kwargs)), list(given))
    with torch.no_grad(), _LiveBytes() as live:
        for tensor in given:
            live.know(tensor)
        result, *made = run_forward(op.target_name, args)
        forward = live.dispatched()
        live.peak = before = live.now
        gradients = run_backward(op.target_name, torch.empty_like(result), args, made)
        remaining = sum(tensor.untyped_storage().nbytes() for tensor in gradients)
        return OpRun(int(live.peak - before) - remaining, forward, live.dispatched(forward))


def _moved(func: Any, args: Any, results: Sequence[torch.Tensor]) -> int:
    """Return the bytes that one dispatched op reads and writes, as kernels do that are bound by them.

    None for a view, for memory that nobody writes, and for a product, which is priced by its shape.
    """
    given = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    is_view = bool(storages) and all(result.untyped_storage()._cdata in storages for result in results)
    if (is_view and not func._schema.is_mutable) or "empty" in func.name() or func._overloadpacket in flop_registry:
        return 0
    # An expanded tensor is read as often as it is stored.
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*given, *results))
