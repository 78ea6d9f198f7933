"""Peak of live bytes of one op, and the ops and bytes that it dispatches, forward and backward, on meta tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from planner.graph.op_graph import Op
from planner.graph.run_op import run_op, with_tensors
from planner.model_rewrites.fused_kernels import run_backward, run_forward


class Dispatched(NamedTuple):
    """What torch dispatches in one pass of an op.

    Attributes:
        ops: number of dispatched ops, views included.
        nbytes: bytes that they read and write, matrix multiplications left out.
    """

    ops: int
    nbytes: int


class OpRun(NamedTuple):
    """One run of an op, forward and backward.

    Attributes:
        rise: peak of live bytes in the backward, beyond those at its start and the gradients that it returns.
        forward, backward: what each pass dispatches.
    """

    rise: int
    forward: Dispatched
    backward: Dispatched


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
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
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


def forward_peak(op: Op, inputs: Sequence[torch.Tensor]) -> int:
    """Return the peak of live bytes in the forward of ``op`` beyond its inputs, which are meta tensors."""
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    with LiveBytesMode() as live:
        for leaf in leaves:
            live.ignore(leaf)
        run_op(op, leaves)
    return int(live.peak)


def run_both_ways(op: Op, inputs: Sequence[torch.Tensor]) -> OpRun:
    """Return what ``op`` allocates and dispatches, forward and backward.

    Args:
        inputs: meta tensors; the gradients of those that require one are computed.
    """
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    differentiable = [leaf for leaf in leaves if leaf.requires_grad]
    with LiveBytesMode() as live:
        for leaf in leaves:
            live.ignore(leaf)
        # Autograd does not let an in-place op write to a leaf: run its functional variant.
        leaves_of_result = pytree.tree_leaves(run_op(op, leaves, functional=bool(differentiable)))
        tensors = [leaf for leaf in leaves_of_result if isinstance(leaf, torch.Tensor)]
        # A view of a leaf requires a gradient even without a graph.
        results = [tensor for tensor in tensors if tensor.requires_grad and op.grad_enabled]
        del leaves_of_result, tensors
        forward = live.dispatched()
        if not differentiable or not results:
            return OpRun(0, forward, NOTHING)
        output_gradients = [torch.empty_like(result) for result in results]
        del results[1:]
        before, before_backward = live.now, live.dispatched()
        live.peak = before
        gradients = torch.autograd.grad(results, differentiable, output_gradients[:1], allow_unused=True)
        nbytes = {g.untyped_storage()._cdata: g.untyped_storage().nbytes() for g in gradients if g is not None}
        passed_on = {gradient.untyped_storage()._cdata for gradient in output_gradients}
        returned_nbytes = sum(int(size) for storage, size in nbytes.items() if storage not in passed_on)
        return OpRun(int(live.peak - before) - returned_nbytes, forward, live.dispatched(before_backward))


def run_fused(op: Op, inputs: Sequence[torch.Tensor]) -> OpRun:
    """Return what the formulas of a fused op (`fused_kernels`) allocate and dispatch, run step by step on meta."""
    tensors = [tensor.detach() for tensor in inputs]
    args, _ = with_tensors((op.args, dict(op.kwargs)), tensors)
    with torch.no_grad(), LiveBytesMode() as live:
        for tensor in tensors:
            live.ignore(tensor)
        result, *saved = run_forward(op.target_name, args)
        forward = live.dispatched()
        live.peak = before = live.now
        gradients = run_backward(op.target_name, torch.empty_like(result), args, saved)
        returned_nbytes = sum(tensor.untyped_storage().nbytes() for tensor in gradients)
        return OpRun(int(live.peak - before) - returned_nbytes, forward, live.dispatched(forward))


def _moved_nbytes(func: Any, args: Any, results: Sequence[torch.Tensor]) -> int:
    """Return the bytes that one dispatched op reads and writes.

    0 for a view and for uninitialized memory, which move none, and for a GEMM, which is priced by its shape.
    """
    inputs = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    is_view = bool(storages) and all(result.untyped_storage()._cdata in storages for result in results)
    if (is_view and not func._schema.is_mutable) or "empty" in func.name() or func._overloadpacket in flop_registry:
        return 0
    # An expanded tensor is read as often as it is stored.
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*inputs, *results))
