"""`activation_costs`: what an activation of a module's own costs, as measured on meta tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from planner.counting.live_bytes import LiveBytesMode
from planner.model_rewrites.experts.experts_op import ActivationCosts

_ROWS, _INNER = 64, 64


def activation_costs(activation: Callable[[torch.Tensor], torch.Tensor], matrices: int) -> ActivationCosts:
    """Return what an elementwise activation costs, as `executor.ops.experts` runs it.

    The forward is one call, whose result is multiplied by the routing weight in place. The backward calls it once more,
    with a graph, copies the result, multiplies the copy by its gradient (a sum for the routing weight's gradient) and
    by the routing weight, and the gradient by the routing weight.

    Args:
        activation: ``[rows, matrices * inner]`` -> ``[rows, inner]``.
        matrices: matrices of the first GEMM's weight: 2 with a gate, else 1.
    """
    unit = _ROWS * _INNER * torch.empty((), dtype=torch.float32).itemsize
    rows = torch.empty(_ROWS, matrices * _INNER, device="meta")
    with torch.inference_mode(False), torch.no_grad(), LiveBytesMode() as live:
        live.ignore(rows)
        result = activation(rows)
        forward_peak, forward = live.peak, live.moved_nbytes
        del result
    leaf, gradient = rows.detach().requires_grad_(), torch.empty(_ROWS, _INNER, device="meta")
    with torch.inference_mode(False), torch.enable_grad(), LiveBytesMode() as live:
        live.ignore(leaf)
        result = activation(leaf)
        graph_peak, held = live.peak, live.now
        live.peak = live.now
        torch.autograd.grad(result, leaf, gradient)
        backward_peak, backward = live.peak, live.moved_nbytes
    copy, product, own_gradient = 1, 1, 1
    return ActivationCosts(
        moved=forward / unit + 2,
        peak=forward_peak / unit,
        backward_moved=backward / unit + 2 + 4 + 2 + 2,
        recompute_peak=own_gradient + max(graph_peak / unit, held / unit + copy + product),
        backward_peak=own_gradient + backward_peak / unit,
    )
