"""Scaled dot-product attention on local pieces, with batch and heads split on any axes, and the sequence on one.

Batch and heads are independent of each other, so every rank runs the kernel of its device on what it holds. DTensor
would take the op apart where it has no rule for the kernel, as on CPUs, and folds batch and heads into one dim there.
Where the sequence is split, keys and values are gathered: `executor.ops.context_parallel`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout, sharded_dim
from executor.ops.context_parallel import SEQUENCE, context_parallel_attention
from executor.redistribute import Redistributor, stride_as

_SPLITS = (Replicate(), Shard(0), Shard(1))


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

    NotImplemented unless query, key and value, of four dims, have one layout that splits no other dim than batch, heads
    and, without dropout, on one axis the sequence. A mask is taken to that layout where it has those dims: a replicated
    one is sliced.
    """
    inputs = [redistributor.as_dtensor(tensor) for tensor in (query, key, value)]
    layout = tuple(inputs[0].placements)
    if any(tensor.dim() != 4 or tuple(tensor.placements) != layout for tensor in inputs):
        return NotImplemented
    order = redistributor.zigzag
    split = [axis for axis, place in enumerate(layout) if place == SEQUENCE and redistributor.axis_size(axis) > 1]
    if order is not None:
        order.check_attention(split if attn_mask is None else [])
    if any(placement not in (*_SPLITS, SEQUENCE) for placement in layout):
        return NotImplemented
    if split and (len(split) > 1 or dropout_p or (attn_mask is not None and attn_mask.requires_grad)):
        return NotImplemented
    if split and is_causal and inputs[0].shape[2] != inputs[1].shape[2]:
        return NotImplemented
    mask = None
    if attn_mask is not None:
        if attn_mask.dim() != 4:
            return NotImplemented
        mask = _local_mask(redistributor, redistributor.as_dtensor(attn_mask), layout)
    if split:
        scale, is_zigzag = options.get("scale"), order is not None
        return context_parallel_attention(redistributor, split[0], inputs, mask, is_causal, scale, is_zigzag=is_zigzag)
    # The op is linear in its output's gradient, which has the layout of the output, and the inputs' have it too.
    pieces = [tensor.to_local(grad_placements=layout) for tensor in inputs]
    found = F.scaled_dot_product_attention(
        pieces[0], pieces[1], pieces[2], attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, **options
    )
    shape = (*inputs[0].shape[:3], inputs[2].shape[3])
    return DTensor.from_local(
        found,
        redistributor.device_mesh,
        layout,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride_as(found, shape, inputs[0]),
        grad_placements=layout,
    )


def _local_mask(redistributor: Redistributor, mask: DTensor, layout: Layout) -> torch.Tensor:
    """Return what this rank needs of ``mask`` [batch or 1, heads or 1, queries, keys]."""
    wanted: list[Placement] = []
    gradient: list[Placement] = []
    for placement in layout:
        dim = sharded_dim(placement)
        covers = dim is not None and mask.shape[dim] > 1
        wanted.append(placement if covers else Replicate())
        gradient.append(Partial() if dim is not None and not covers else placement)
    if tuple(wanted) != tuple(mask.placements):
        mask = redistributor.redistribute(mask, tuple(wanted), tuple(gradient))
    # A mask that is learned, as T5's, is one for the whole batch: each rank's gradient is an addend, and stays one.
    return mask.to_local(grad_placements=tuple(gradient))
