"""Embedding lookup in a table that is split by rows (vocabulary) or columns, for indices that are split anyhow."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals import local_of, make_dtensor, run_function


def embedding(
    redistributor: Redistributor,
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Return the rows of ``weight`` [rows, columns] at ``input`` [...], as [..., columns]; arguments as in torch.

    On each axis, rows split gives a partial result, columns split one split on its last dim, indices split the same
    split. NotImplemented where rows and indices are split on one axis, or for ``max_norm``, ``sparse`` and
    ``scale_grad_by_freq``.
    """
    if max_norm is not None or sparse or scale_grad_by_freq:
        return NotImplemented
    ids, table = redistributor.as_dtensor(input), redistributor.as_dtensor(weight)
    output = _output_layout(tuple(ids.placements), tuple(table.placements), ids.dim())
    if output is None:
        return NotImplemented
    padding = -1 if padding_idx is None else padding_idx % table.shape[0]
    return run_function(_Embedding, table, ids, redistributor, output, padding)


def _output_layout(ids: Layout, table: Layout, width: int) -> Layout | None:
    output: list[Placement] = []
    for at, of in zip(ids, table, strict=True):
        if at == Replicate() and of in (Replicate(), Shard(0), Shard(1)):
            output.append(Partial() if of == Shard(0) else Shard(width) if of == Shard(1) else Replicate())
        elif isinstance(at, Shard) and of == Replicate():
            output.append(at)
        else:
            return None
    return tuple(output)


def split_offset(redistributor: Redistributor, length: int, layout: Layout, dim: int) -> tuple[int, int]:
    """Return (first index, number of indices) of the piece of dim ``dim``, of ``length``, that this rank holds."""
    first = 0
    for axis, placement in enumerate(layout):
        if placement == Shard(dim):
            length //= redistributor.axis_size(axis)
            first += redistributor.coordinate(axis) * length
    return first, length


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: DTensor, ids: DTensor, redistributor: Redistributor, output: Layout, padding: int
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        layout = tuple(table.placements)
        first, rows = split_offset(redistributor, table.shape[0], layout, 0)
        local_ids = local_of(ids) - first
        elsewhere = None if rows == table.shape[0] else (local_ids < 0) | (local_ids >= rows)
        if elsewhere is not None:
            local_ids = local_ids.masked_fill(elsewhere, 0)
        found = torch.ops.aten.embedding.default(local_of(table), local_ids)
        if elsewhere is not None:
            found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        ctx.save_for_backward(local_of(ids))
        ctx.redistributor, ctx.output, ctx.first, ctx.rows, ctx.padding = redistributor, output, first, rows, padding
        ctx.table_layout, ctx.ids_layout, ctx.shape = layout, tuple(ids.placements), tuple(table.shape)
        shape = (*ids.shape, table.shape[1])
        return make_dtensor(found, redistributor.device_mesh, output, shape, contiguous_stride(shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, None, None, None, None]:
        if gradient is None:
            return None, None, None, None, None
        redistributor: Redistributor = ctx.redistributor
        arrived = redistributor.as_dtensor(gradient)
        wanted, result = _gradient_layouts(tuple(arrived.placements), ctx.table_layout, ctx.ids_layout, ctx.output)
        local = local_of(redistributor.to_layout(arrived, wanted))
        (ids,) = ctx.saved_tensors
        local_ids = ids - ctx.first
        skipped = (local_ids < 0) | (local_ids >= ctx.rows)
        if ctx.padding >= 0:
            skipped = skipped | (ids == ctx.padding)
        local = local.masked_fill(skipped.unsqueeze(-1), 0)
        local_ids = local_ids.masked_fill(skipped, 0)
        found = torch.ops.aten.embedding_dense_backward.default(local, local_ids, ctx.rows, -1, False)
        stride = contiguous_stride(ctx.shape)
        return make_dtensor(found, redistributor.device_mesh, result, ctx.shape, stride), None, None, None, None


def _gradient_layouts(arrived: Layout, table: Layout, ids: Layout, output: Layout) -> tuple[Layout, Layout]:
    """Return the layout that the output's gradient is needed in, and the one that the table's comes out in."""
    wanted: list[Placement] = []
    result: list[Placement] = []
    for came, of, at, out in zip(arrived, table, ids, output, strict=True):
        if isinstance(at, Shard):
            wanted.append(at)
            result.append(Partial())
        elif of == Replicate():
            # The lookup is linear: what is partial may stay so.
            keeps = came.is_partial()
            wanted.append(came if keeps else Replicate())
            result.append(came if keeps else Replicate())
        else:
            wanted.append(Replicate() if out.is_partial() else out)
            result.append(of)
    return tuple(wanted), tuple(result)
