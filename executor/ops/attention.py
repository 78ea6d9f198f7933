"""Scaled dot-product attention on local tensors, with batch and heads sharded on any axes, and the sequence on one.

Samples and heads are independent of each other, so every rank runs its device's kernel on its local tensors. DTensor
would decompose the op where it has no rule for the kernel, as on CPUs, and would fold batch and heads into one dim.
Where the sequence is sharded, ``executor.ops.context_parallel`` all-gathers keys and values.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout, sharded_dim
from executor.ops.context_parallel.attention import SEQUENCE, context_parallel_attention
from executor.redistribute import Redistributor, stride_as
from executor.torch_internals.random import random_region

_LOCAL = (Replicate(), Shard(0), Shard(1))
"""Placements of [batch, heads, sequence, width] under which attention needs no communication."""


def attention(
    redistributor: Redistributor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Return attention [batch, heads, queries, width] in the layout of ``query``; arguments as in torch.

    The result is NotImplemented unless query, key and value have four dims and the same layout, which shards only batch
    and heads. The sequence may be sharded on one axis too, if there is no dropout and no mask with a gradient; causal
    attention then needs as many queries as keys. A mask needs four dims. It is redistributed to the same layout, except
    that its dims of length 1 stay replicated.

    Raises:
        PlanLayoutError: sequences are in zigzag order, but there is a mask, or the sequence is not sharded on the
            zigzag axis alone.
    """
    inputs = [redistributor.as_dtensor(tensor) for tensor in (query, key, value)]
    layout = tuple(inputs[0].placements)
    if any(tensor.dim() != 4 or tuple(tensor.placements) != layout for tensor in inputs):
        return NotImplemented
    zigzag = redistributor.zigzag
    sequence_axes = [
        axis for axis, place in enumerate(layout) if place == SEQUENCE and redistributor.axis_size(axis) > 1
    ]
    if zigzag is not None:
        zigzag.check_attention(sequence_axes if attn_mask is None else [])
    if any(placement not in (*_LOCAL, SEQUENCE) for placement in layout):
        return NotImplemented
    if sequence_axes and (len(sequence_axes) > 1 or dropout_p or (attn_mask is not None and attn_mask.requires_grad)):
        return NotImplemented
    if sequence_axes and is_causal and inputs[0].shape[2] != inputs[1].shape[2]:
        return NotImplemented
    mask = None
    if attn_mask is not None:
        if attn_mask.dim() != 4:
            return NotImplemented
        mask = _local_mask(redistributor, redistributor.as_dtensor(attn_mask), layout)
    if sequence_axes:
        return context_parallel_attention(
            redistributor,
            sequence_axes[0],
            inputs,
            mask,
            is_causal,
            options.get("scale"),
            is_zigzag=zigzag is not None,
        )
    # The gradients of the output and of all inputs have this layout.
    q, k, v = (tensor.to_local(grad_placements=layout) for tensor in inputs)
    with random_region(layout) if dropout_p and not q.is_meta else nullcontext():
        result = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, **options
        )
    shape = (*inputs[0].shape[:3], inputs[2].shape[3])
    return DTensor.from_local(
        result,
        redistributor.device_mesh,
        layout,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride_as(result, shape, inputs[0]),
        grad_placements=layout,
    )


def _local_mask(redistributor: Redistributor, mask: DTensor, layout: Layout) -> torch.Tensor:
    """Return the local mask for attention in ``layout``; ``mask`` is [batch or 1, heads or 1, queries, keys]."""
    target: list[Placement] = []
    gradient: list[Placement] = []
    for placement in layout:
        dim = sharded_dim(placement)
        is_sharded = dim is not None and mask.shape[dim] > 1
        target.append(placement if is_sharded else Replicate())
        gradient.append(Partial() if dim is not None and not is_sharded else placement)
    if tuple(target) != tuple(mask.placements):
        mask = redistributor.redistribute(mask, tuple(target), tuple(gradient))
    # A learned mask, such as T5's, is shared by the whole batch: each rank's gradient is an addend, and stays partial.
    return mask.to_local(grad_placements=tuple(gradient))
