"""Bags of embeddings from a table that is sharded by rows or by columns, or for bags that are split over ranks.

DTensor has no rule for ``embedding_bag``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cost_model.layouts.layout import Layout, format_layout
from executor.ops.lookups.embedding import gradient_layouts, output_layout, split_offset
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function
from planner.errors import PlanLayoutError

Mode = Literal["sum", "mean", "max"]


def embedding_bag(
    redistributor: Redistributor,
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: Mode = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> DTensor:
    """Return the reduced rows of ``weight`` [rows, columns] of each bag, as [bags, columns]; arguments as in torch.

    On an axis that shards rows the result is partial (with "max" replicated), on one that shards columns its last dim
    is sharded, and on one that splits the bags, which ``input`` [bags, bag] alone can be, its first dim.

    Raises:
        PlanLayoutError: an axis shards both the table and the bags, or flat indices; or ``max_norm``, ``sparse`` or
            ``scale_grad_by_freq`` is given.
    """
    ids, table = redistributor.as_dtensor(input), redistributor.as_dtensor(weight)
    weights = None if per_sample_weights is None else redistributor.as_dtensor(per_sample_weights)
    starts = None if offsets is None else redistributor.as_dtensor(offsets)
    layout = output_layout(tuple(ids.placements), tuple(table.placements), 1)
    flat = ids.dim() == 1
    if weights is not None and weights.placements != ids.placements:
        weights = redistributor.redistribute(weights, tuple(ids.placements))
    if max_norm is not None or sparse or scale_grad_by_freq:
        raise _refused(ids, table, "max_norm, sparse or scale_grad_by_freq", "Leave these options out.")
    splits_bags = all(not isinstance(place, Shard) or place == Shard(0) for place in ids.placements)
    if layout is None or not splits_bags or (flat and any(isinstance(place, Shard) for place in ids.placements)):
        raise _refused(ids, table, "these layouts", "Replicate the indices, or the table, on each axis.")
    if starts is not None and any(place != Replicate() for place in starts.placements):
        raise _refused(ids, table, "sharded offsets", "Replicate the offsets.")
    if mode == "max":
        layout = tuple(Replicate() if place.is_partial() else place for place in layout)
    bags = _bags(local_of(ids), None if starts is None else local_of(starts), include_last_offset)
    padding = -1 if padding_idx is None else padding_idx % table.shape[0]
    call = _Call(
        redistributor=redistributor,
        mode=mode,
        padding=padding,
        table_layout=tuple(table.placements),
        ids_layout=tuple(ids.placements),
        output=layout,
        table_shape=tuple(table.shape),
        bags=ids.shape[0] if not flat else bags.count,
        ids_shape=tuple(ids.shape),
    )
    result: DTensor = run_function(_MaxBags if mode == "max" else _SumBags, table, weights, bags, call)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bags:
    """This rank's bags, flat: ``ids`` [n], the bag of each id ``bag_of`` [n], the first id of each bag ``offsets``."""

    ids: torch.Tensor
    bag_of: torch.Tensor
    offsets: torch.Tensor

    @property
    def count(self) -> int:
        """Number of bags."""
        return int(self.offsets.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What forward and backward know of the call: its options, and the global shapes and layouts of its tensors."""

    redistributor: Redistributor
    mode: Mode
    padding: int
    table_layout: Layout
    ids_layout: Layout
    output: Layout
    table_shape: tuple[int, ...]
    bags: int
    ids_shape: tuple[int, ...]

    def local_rows(self) -> tuple[int, int]:
        """Return (first row, number of rows) of this rank's shard of the table."""
        return split_offset(self.redistributor, self.table_shape[0], self.table_layout, 0)

    def result(self, local: torch.Tensor) -> DTensor:
        """Return the result whose local tensor is ``local``."""
        shape = (self.bags, self.table_shape[1])
        return make_dtensor(local, self.redistributor.device_mesh, self.output, shape, contiguous_stride(shape))

    def gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Layout]:
        """Return this rank's gradient of its bags, and the layout of the table's gradient."""
        grad_out = self.redistributor.as_dtensor(gradient)
        needed, grad_layout = gradient_layouts(
            tuple(grad_out.placements), self.table_layout, self.ids_layout, self.output
        )
        return local_of(self.redistributor.to_layout(grad_out, needed)), grad_layout

    def table_gradient(self, local: torch.Tensor, layout: Layout) -> DTensor:
        """Return the gradient of the table whose local tensor is ``local``."""
        mesh, stride = self.redistributor.device_mesh, contiguous_stride(self.table_shape)
        return make_dtensor(local, mesh, layout, self.table_shape, stride)

    def weights_gradient(self, local: torch.Tensor, grad_layout: Layout) -> DTensor:
        """Return the gradient of the weights of samples: partial where this rank saw a part of the rows or columns."""
        layout = tuple(
            ids if isinstance(ids, Shard) else (Partial() if isinstance(table, Shard) or grad.is_partial() else ids)
            for ids, table, grad in zip(self.ids_layout, self.table_layout, grad_layout, strict=True)
        )
        mesh, stride = self.redistributor.device_mesh, contiguous_stride(self.ids_shape)
        return make_dtensor(local, mesh, layout, self.ids_shape, stride)


def _bags(ids: torch.Tensor, offsets: torch.Tensor | None, include_last_offset: bool) -> _Bags:
    if ids.dim() == 2:
        rows, length = ids.shape
        offsets = torch.arange(0, rows * length, max(length, 1), device=ids.device)[:rows]
    elif offsets is None:
        raise ValueError("embedding_bag takes indices [bags, bag], or indices [n] with offsets [bags]")
    elif include_last_offset:
        offsets = offsets[:-1]
    flat = ids.reshape(-1)
    ends = torch.cat([offsets[1:], offsets.new_tensor([flat.shape[0]])])
    numbers = torch.arange(offsets.shape[0], device=ids.device)
    # The size is given, because on meta nobody can count.
    bag_of = torch.repeat_interleave(numbers, ends - offsets, output_size=flat.shape[0])
    return _Bags(ids=flat, bag_of=bag_of, offsets=offsets)


def _refused(ids: DTensor, table: DTensor, what: str, advice: str) -> PlanLayoutError:
    layouts = [f"({', '.join(format_layout(tuple(tensor.placements)))})" for tensor in (ids, table)]
    return PlanLayoutError(
        f"embedding_bag does not run with {what}: indices of shape {tuple(ids.shape)} come in {layouts[0]}, and the "
        f"table of shape {tuple(table.shape)} in {layouts[1]}.",
        field="plan",
        what_to_do=advice,
    )


def _here(bags: _Bags, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the local row of each id [n], and whether it is one of this rank's rows and no padding [n]."""
    first, rows = call.local_rows()
    local_ids = bags.ids - first
    is_here = (local_ids >= 0) & (local_ids < rows) & (bags.ids != call.padding)
    return local_ids.masked_fill(~is_here, 0), is_here


class _SumBags(torch.autograd.Function):
    """Sums, and means: each row counts with a coefficient, which is 0 for rows of other ranks."""

    @staticmethod
    def forward(ctx: Any, table: DTensor, weights: DTensor | None, bags: _Bags, call: _Call) -> DTensor:
        ctx.set_materialize_grads(False)
        local_ids, is_here = _here(bags, call)
        local = local_of(table)
        scale = is_here.to(local.dtype)
        if call.mode == "mean":
            counted = (bags.ids != call.padding).to(local.dtype)
            sizes = torch.zeros(bags.count, dtype=local.dtype, device=local.device).index_add_(0, bags.bag_of, counted)
            scale = scale / sizes.clamp(min=1)[bags.bag_of]
        coefficients = scale if weights is None else scale * local_of(weights).reshape(-1)
        ctx.save_for_backward(local, local_ids, scale, coefficients)
        ctx.bags, ctx.call, ctx.has_weights = bags, call, weights is not None
        return call.result(_weighted_sums(local, local_ids, coefficients, bags))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, DTensor | None, None, None]:
        if gradient is None:
            return None, None, None, None
        call: _Call = ctx.call
        grad_out, grad_layout = call.gradients(gradient)
        local, local_ids, scale, coefficients = ctx.saved_tensors
        with torch.enable_grad():
            rows, factors = local.detach().requires_grad_(), coefficients.detach().requires_grad_()
            sums = _weighted_sums(rows, local_ids, factors, ctx.bags)
        if not sums.requires_grad:  # this rank has no row
            grad_rows, grad_factors = torch.zeros_like(local), torch.zeros_like(coefficients)
        else:
            grad_rows, grad_factors = torch.autograd.grad(sums, (rows, factors), grad_out)
        grad_weights = None
        if ctx.has_weights:
            grad_weights = call.weights_gradient((grad_factors * scale).reshape(_local_shape(ctx, call)), grad_layout)
        return call.table_gradient(grad_rows, grad_layout), grad_weights, None, None


def _local_shape(ctx: Any, call: _Call) -> tuple[int, ...]:
    """Return the shape of this rank's indices."""
    return (ctx.bags.count, *call.ids_shape[1:]) if len(call.ids_shape) == 2 else call.ids_shape


def _weighted_sums(
    table: torch.Tensor, local_ids: torch.Tensor, coefficients: torch.Tensor, bags: _Bags
) -> torch.Tensor:
    if table.shape[0] == 0:
        return table.new_zeros(bags.count, table.shape[1])
    return F.embedding_bag(local_ids, table, bags.offsets, mode="sum", per_sample_weights=coefficients)


class _MaxBags(torch.autograd.Function):
    """The largest value of each bag and column; the gradient goes to the first of the rows that have it."""

    @staticmethod
    def forward(ctx: Any, table: DTensor, weights: DTensor | None, bags: _Bags, call: _Call) -> DTensor:
        ctx.set_materialize_grads(False)
        if weights is not None:
            raise NotImplementedError("embedding_bag takes per_sample_weights with mode sum only")
        local_ids, is_here = _here(bags, call)
        local = local_of(table)
        values = local[local_ids] if local.shape[0] else local.new_zeros(len(local_ids), local.shape[1])
        values = values.masked_fill(~is_here.unsqueeze(1), -torch.inf)
        index = bags.bag_of.unsqueeze(1).expand_as(values)
        largest = values.new_full((bags.count, values.shape[1]), -torch.inf).scatter_reduce(0, index, values, "amax")
        largest = _over_rows(largest, "max", call)
        # Positions count over all ids, so that ranks agree on the row that wins.
        positions = torch.arange(len(local_ids), device=local.device).unsqueeze(1).expand_as(values)
        positions = positions.masked_fill((values != largest[bags.bag_of]) | ~is_here.unsqueeze(1), len(local_ids))
        winner = positions.new_full(largest.shape, len(local_ids)).scatter_reduce(0, index, positions, "amin")
        winner = _over_rows(winner, "min", call)
        ctx.save_for_backward(local_ids, is_here, winner)
        ctx.call, ctx.rows = call, local.shape[0]
        return call.result(largest.masked_fill(largest == -torch.inf, 0))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        call: _Call = ctx.call
        grad_out, grad_layout = call.gradients(gradient)
        local_ids, is_here, winner = ctx.saved_tensors
        result = grad_out.new_zeros(ctx.rows, grad_out.shape[1])
        if ctx.rows and len(local_ids):
            won = winner < len(local_ids)
            winner = winner.masked_fill(~won, 0)
            is_mine = won & is_here[winner]
            result.scatter_add_(0, local_ids[winner], grad_out.masked_fill(~is_mine, 0))
        return call.table_gradient(result, grad_layout), None, None, None


def _over_rows(local: torch.Tensor, reduce_op: str, call: _Call) -> torch.Tensor:
    """Return ``local`` reduced over the axes that shard the table's rows."""
    for axis, placement in enumerate(call.table_layout):
        if placement == Shard(0):
            local = call.redistributor.all_reduce(local, reduce_op, axis)
    return local
