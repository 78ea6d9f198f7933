"""Embedding lookup in a table that is sharded by rows (the vocabulary) or by columns, for indices in any layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function


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

    The layouts of the table and of the indices decide that of the result: on an axis that shards rows it is partial; on
    one that shards columns, its last dim is sharded; on one that shards the indices, it is sharded as the indices. It
    is NotImplemented if an axis shards both the table and the indices, and with ``max_norm``, ``sparse`` or
    ``scale_grad_by_freq``.
    """
    if max_norm is not None or sparse or scale_grad_by_freq:
        return NotImplemented
    ids, table = redistributor.as_dtensor(input), redistributor.as_dtensor(weight)
    output = output_layout(tuple(ids.placements), tuple(table.placements), ids.dim())
    if output is None:
        return NotImplemented
    padding = -1 if padding_idx is None else padding_idx % table.shape[0]
    return run_function(_Embedding, table, ids, redistributor, output, padding)


def output_layout(ids: Layout, table: Layout, last_dim: int) -> Layout | None:
    """Return the layout of the result, whose last dim is ``last_dim``; None where the layouts are not covered."""
    output: list[Placement] = []
    for id_place, table_place in zip(ids, table, strict=True):
        if id_place == Replicate() and table_place == Shard(0):
            output.append(Partial())
        elif id_place == Replicate() and table_place in (Replicate(), Shard(1)):
            output.append(Shard(last_dim) if table_place == Shard(1) else Replicate())
        elif isinstance(id_place, Shard) and table_place == Replicate():
            output.append(id_place)
        else:
            return None
    return tuple(output)


def split_offset(redistributor: Redistributor, length: int, layout: Layout, dim: int) -> tuple[int, int]:
    """Return (first index, number of indices) of this rank's shard of dim ``dim``, whose length is ``length``.

    Where an axis does not divide the length, the shards are the chunks of ``torch.chunk``, as DTensor's are.
    """
    first = 0
    for axis, placement in enumerate(layout):
        if placement == Shard(dim):
            chunk = -(-length // redistributor.axis_size(axis))
            start = min(redistributor.coordinate(axis) * chunk, length)
            first += start
            length = min(chunk, length - start)
    return first, length


class _Embedding(torch.autograd.Function):
    """Looks up the indices that lie in this rank's rows; all other indices give zeros."""

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
        result = torch.ops.aten.embedding.default(local_of(table), local_ids)
        if elsewhere is not None:
            result = result.masked_fill(elsewhere.unsqueeze(-1), 0)
        ctx.save_for_backward(local_of(ids))
        ctx.redistributor, ctx.output, ctx.first, ctx.rows, ctx.padding = redistributor, output, first, rows, padding
        ctx.table_layout, ctx.ids_layout, ctx.shape = layout, tuple(ids.placements), tuple(table.shape)
        shape = (*ids.shape, table.shape[1])
        return make_dtensor(result, redistributor.device_mesh, output, shape, contiguous_stride(shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, None, None, None, None]:
        if gradient is None:
            return None, None, None, None, None
        redistributor: Redistributor = ctx.redistributor
        grad_out = redistributor.as_dtensor(gradient)
        out_layout, grad_layout = gradient_layouts(
            tuple(grad_out.placements), ctx.table_layout, ctx.ids_layout, ctx.output
        )
        local = local_of(redistributor.to_layout(grad_out, out_layout))
        (ids,) = ctx.saved_tensors
        local_ids = ids - ctx.first
        skipped = (local_ids < 0) | (local_ids >= ctx.rows)
        if ctx.padding >= 0:
            skipped = skipped | (ids == ctx.padding)
        local = local.masked_fill(skipped.unsqueeze(-1), 0)
        local_ids = local_ids.masked_fill(skipped, 0)
        grad_table = torch.ops.aten.embedding_dense_backward.default(local, local_ids, ctx.rows, -1, False)
        stride = contiguous_stride(ctx.shape)
        gradient = make_dtensor(grad_table, redistributor.device_mesh, grad_layout, ctx.shape, stride)
        return gradient, None, None, None, None


def gradient_layouts(gradient: Layout, table: Layout, ids: Layout, output: Layout) -> tuple[Layout, Layout]:
    """Return the layout in which the backward needs the output's gradient, and the layout of the table's gradient.

    Args:
        gradient: layout in which autograd gives the output's gradient.
        table: layout of the table.
        ids: layout of the indices.
        output: layout of the output.
    """
    needed: list[Placement] = []
    result: list[Placement] = []
    for grad_place, table_place, id_place, out_place in zip(gradient, table, ids, output, strict=True):
        if isinstance(id_place, Shard):
            needed.append(id_place)
            result.append(Partial())
        elif table_place == Replicate():
            # The backward is linear in the gradient, so a partial gradient can stay partial.
            place = grad_place if grad_place.is_partial() else Replicate()
            needed.append(place)
            result.append(place)
        else:
            needed.append(Replicate() if out_place.is_partial() else out_place)
            result.append(table_place)
    return tuple(needed), tuple(result)
