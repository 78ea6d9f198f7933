"""Peak of live bytes of one op, and the ops and bytes that it dispatches, forward and backward, on meta tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from planner.counting.live_bytes import NOTHING, Dispatched, LiveBytesMode
from planner.graph.op_graph import Op
from planner.graph.run_op import run_op, with_tensors
from planner.model_rewrites.fused_kernels import run_backward, run_forward


class OpRun(NamedTuple):
    """One run of an op, forward and backward.

    Attributes:
        rise: peak of live bytes in the backward, beyond those at its start and the gradients that it returns.
        forward, backward: what each pass dispatches.
    """

    rise: int
    forward: Dispatched
    backward: Dispatched


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
