"""``torch.where(condition, tensor, number)`` with a replicated condition, as T5 masks its learned position bias.

The backward is linear in the gradient, so a partial gradient stays partial. DTensor would reduce it inside the backward
pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from cost_model.layouts.layout import Layout, sharded_dim
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function


def where(redistributor: Redistributor, condition: torch.Tensor, input: Any = None, other: Any = None) -> Any:
    """Return ``input`` where ``condition`` holds and the number ``other`` elsewhere, in the layout of ``input``.

    NotImplemented unless ``condition`` is plain, ``input`` is a DTensor that is partial on no axis, ``other`` is a
    number, and the result has the shape of ``input``.
    """
    if isinstance(condition, DTensor) or not isinstance(input, DTensor) or not isinstance(other, (int, float)):
        return NotImplemented
    if condition.dim() != input.dim() or any(placement.is_partial() for placement in input.placements):
        return NotImplemented
    if any(c not in (1, t) for c, t in zip(condition.shape, input.shape, strict=True)):
        return NotImplemented
    return run_function(_Where, input, _local_condition(redistributor, condition, input), other, redistributor)


def _local_condition(redistributor: Redistributor, condition: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """Return the shard of ``condition`` for the local tensor of ``tensor``; dims of length one are not sharded."""
    layout: Layout = tuple(
        Replicate() if (dim := sharded_dim(placement)) is None or condition.shape[dim] == 1 else placement
        for placement in tensor.placements
    )
    return local_of(redistributor.to_layout(redistributor.as_dtensor(condition), layout))


class _Where(torch.autograd.Function):
    """Masks the local tensor, and the local gradient by the same condition."""

    @staticmethod
    def forward(
        ctx: Any, tensor: DTensor, condition: torch.Tensor, other: float, redistributor: Redistributor
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(condition)
        ctx.redistributor, ctx.layout = redistributor, tuple(tensor.placements)
        result = torch.where(condition, local_of(tensor), other)
        return _as_dtensor(result, redistributor, ctx.layout, tuple(tensor.shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        redistributor: Redistributor = ctx.redistributor
        grad_out = redistributor.as_dtensor(gradient)
        layout: Layout = tuple(
            place if out == Replicate() and place.is_partial() else out
            for place, out in zip(grad_out.placements, ctx.layout, strict=True)
        )
        (condition,) = ctx.saved_tensors
        local = local_of(redistributor.to_layout(grad_out, layout))
        result = torch.where(condition, local, torch.zeros((), dtype=local.dtype, device=local.device))
        return _as_dtensor(result, redistributor, layout, tuple(grad_out.shape)), None, None, None


def _as_dtensor(local: torch.Tensor, redistributor: Redistributor, layout: Layout, shape: tuple[int, ...]) -> DTensor:
    return make_dtensor(local.contiguous(), redistributor.device_mesh, layout, shape, contiguous_stride(shape))
