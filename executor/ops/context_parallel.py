"""Attention whose sequence is split on one axis: context parallelism by gathering keys and values.

Queries, keys, values and the result [batch, heads, sequence, width] are this rank's rows. Keys and values of all ranks
are gathered for the kernel, in the backward again, and their gradients scattered as sums. Under a causal mask ranks
exchange halves of their queries (`Halves`), so that all do the same work; `planner.strategies.context_parallel` says
how, and prices it. Where sequences are in an even order already, `executor.ops.zigzag_attention` runs in place of that.

Each part of the keys that a part of the queries sees is one call of the kernel. The results of two parts are put
together by the logarithms of their sums of exponentials, and the kernel's backward, given the joint result and
logarithm, finds each part's share of the gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from cost_model.layouts.layout import Layout
from executor.ops import zigzag_attention
from executor.ops.attention_kernels import attend, attend_backward
from executor.ops.kv_all_gather import Gathering, Scattering
from executor.ops.zigzag_halves import Halves
from executor.redistribute import Redistributor, contiguous_stride, stride_as
from executor.torch_internals import local_of, make_dtensor, run_function

SEQUENCE = Shard(2)


def context_parallel_attention(
    redistributor: Redistributor,
    axis: int,
    inputs: list[DTensor],
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    *,
    is_zigzag: bool = False,
) -> DTensor:
    """Return attention in the layout of ``inputs``: query, key, value, in one layout.

    Args:
        axis: of the mesh, the one on which the sequence is split.
        mask: this rank's rows and all keys; None where it is ``is_causal`` or there is none.
        is_zigzag: whether sequences are in an even order already, keys as well; without a mask.
    """
    scale = inputs[0].shape[3] ** -0.5 if scale is None else scale
    found: DTensor = run_function(_ContextParallel, *inputs, mask, redistributor, axis, is_causal, scale, is_zigzag)
    return found


class _Part(NamedTuple):
    """A call of the kernel: a slice of this rank's queries, a slice of all keys."""

    queries: slice
    keys: slice
    causal: bool


def _parts(halves: Halves | None, queries: int, keys: int) -> list[list[_Part]]:
    """Return the parts of each piece of this rank's queries."""
    if halves is None:
        return [[_Part(slice(0, queries), slice(0, keys), causal=False)]]
    found = []
    first = 0
    for half in halves.even:
        held = halves.range(half)
        rows = slice(first, first + len(held))
        before = [_Part(rows, slice(0, held.start), causal=False)] if held.start else []
        if held:
            found.append([*before, _Part(rows, slice(held.start, held.stop), causal=True)])
        first += len(held)
    return found


class _ContextParallel(torch.autograd.Function):
    """Saves this rank's rows alone."""

    @staticmethod
    def forward(
        ctx: Any,
        query: DTensor,
        key: DTensor,
        value: DTensor,
        mask: torch.Tensor | None,
        redistributor: Redistributor,
        axis: int,
        is_causal: bool,
        scale: float,
        is_zigzag: bool,
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        layout = tuple(query.placements)
        group, ranks = redistributor.device_mesh.get_group(axis), redistributor.axis_size(axis)
        q, k, v = (local_of(tensor) for tensor in (query, key, value))
        halves = Halves(group, ranks, redistributor.coordinate(axis), q.shape[2]) if is_causal else None
        ctx.redistributor, ctx.group, ctx.ranks, ctx.layout, ctx.scale = redistributor, group, ranks, layout, scale
        ctx.shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        ctx.halves, ctx.is_zigzag = halves, is_zigzag
        if halves is not None and is_zigzag:
            result, sums = zigzag_attention.forward(q, k, v, halves, scale)
            own = result
        else:
            q = q if halves is None else halves.to_even(q)
            ctx.parts = _parts(halves, q.shape[2], k.shape[2] * ranks)
            keys, values = _all_rows(k, v, group)
            result, sums = _forward(q, keys, values, mask, ctx.parts, scale)
            del keys, values
            own = result if halves is None else halves.to_own(result)
        ctx.save_for_backward(q, k, v, mask, result, sums)
        shape = (*query.shape[:3], value.shape[3])
        return make_dtensor(own, redistributor.device_mesh, layout, shape, stride_as(own, shape, query))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 9
        redistributor: Redistributor = ctx.redistributor
        arrived = redistributor.to_layout(redistributor.as_dtensor(gradient), ctx.layout)
        halves: Halves | None = ctx.halves
        of_result = local_of(arrived)
        q, k, v, mask, result, sums = ctx.saved_tensors
        if halves is not None and ctx.is_zigzag:
            of_q, of_k, of_v = zigzag_attention.backward(of_result, q, k, v, result, sums, halves, ctx.scale)
        else:
            of_result = of_result if halves is None else halves.to_even(of_result)
            keys, values = _all_rows(k, v, ctx.group)
            of_q, *addends = _backward(of_result, q, keys, values, mask, result, sums, ctx.parts, ctx.scale)
            del keys, values
            of_q = of_q if halves is None else halves.to_own(of_q)
            of_k, of_v = _own_rows(addends, (k.shape, v.shape), ctx.ranks, ctx.group)
        made = [
            _made(local.contiguous(), redistributor, ctx.layout, shape)
            for local, shape in zip((of_q, of_k, of_v), ctx.shapes, strict=True)
        ]
        return *made, None, None, None, None, None, None


def _all_rows(k: torch.Tensor, v: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all ranks' keys and values [batch, heads, all rows, width], in their order."""
    by_rank = Gathering(k, v, group).wait()
    keys, values = (torch.cat(each, 2) for each in by_rank)
    return keys, values


def _own_rows(
    addends: list[torch.Tensor], shapes: tuple[torch.Size, torch.Size], ranks: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows, of ``shapes``, of the sums over ranks of ``addends`` [batch, heads, all rows, width].

    They are let go before the sums arrive.
    """
    scattering = Scattering(shapes, ranks)
    for by_rank, addend, shape in zip(scattering.addends(addends[0]), addends, shapes, strict=True):
        for piece, rows in zip(by_rank, addend.split(shape[2], 2), strict=True):
            piece.copy_(rows)
    addends.clear()
    scattering.start(group)
    return scattering.wait()


def _made(local: torch.Tensor, redistributor: Redistributor, layout: Layout, shape: tuple[int, ...]) -> DTensor:
    return make_dtensor(local, redistributor.device_mesh, layout, shape, contiguous_stride(shape))


def _forward(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    pieces: list[list[_Part]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result [batch, heads, rows, width] and the logarithms of sums [batch, heads, rows], float32."""
    found = []
    for parts in pieces:
        joint: tuple[torch.Tensor, torch.Tensor] | None = None
        for part in parts:
            k, v = keys[:, :, part.keys], values[:, :, part.keys]
            one = attend(q[:, :, part.queries], k, v, mask, part.causal, scale)
            joint = one if joint is None else _joined(*joint, *one)
        assert joint is not None
        found.append(joint)
    if len(found) == 1:
        return found[0]
    return torch.cat([result for result, _ in found], 2), torch.cat([sums for _, sums in found], 2)


def _joined(
    first: torch.Tensor, first_sums: torch.Tensor, second: torch.Tensor, second_sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over two parts of the keys, given each part's result and logarithm of its sum."""
    share = torch.sigmoid(second_sums - first_sums).unsqueeze(-1).to(first.dtype)
    return torch.lerp(first, second, share), torch.logaddexp(first_sums, second_sums)


def _backward(
    of_result: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    result: torch.Tensor,
    sums: torch.Tensor,
    pieces: list[list[_Part]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's queries, and its addends to those of all keys and values."""
    parts = [part for piece in pieces for part in piece]
    if len(parts) == 1:
        return attend_backward(of_result, q, keys, values, mask, result, sums, parts[0].causal, scale)
    of_q, of_keys, of_values = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    for part in parts:
        by_row = [tensor[:, :, part.queries] for tensor in (of_result, q, result, sums)]
        k, v = keys[:, :, part.keys], values[:, :, part.keys]
        found = attend_backward(by_row[0], by_row[1], k, v, mask, by_row[2], by_row[3], part.causal, scale)
        of_q[:, :, part.queries] += found[0]
        of_keys[:, :, part.keys] += found[1]
        of_values[:, :, part.keys] += found[2]
    return of_q, of_keys, of_values
