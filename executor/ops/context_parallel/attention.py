"""Context parallelism: attention whose sequence is sharded on one axis, by an all-gather of keys and values.

Queries, keys, values and the result [batch, heads, sequence, width] are this rank's rows. The forward all-gathers the
keys and values of all ranks. The backward all-gathers them again, and reduce-scatters their gradients. Under a causal
mask ranks exchange chunks of their queries (``ZigzagChunks``), so that all ranks do equal work;
``planner.strategies.context_parallel`` explains and prices this. Where sequences are in zigzag order already,
``executor.ops.context_parallel.zigzag_attention`` runs instead.

Each pair of a piece of the queries and a piece of the keys that it sees is one call of the kernel. The results over two
pieces of keys are combined by their log-sum-exps (``lse``). The kernel's backward gets the combined result and lse, and
returns the addends of this pair to the gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from executor.ops.attention_kernels import attend, attend_backward
from executor.ops.context_parallel import zigzag_attention
from executor.ops.context_parallel.kv_all_gather import KVAllGather, KVReduceScatter
from executor.ops.context_parallel.zigzag_chunks import ZigzagChunks
from executor.redistribute import Redistributor, contiguous_stride, stride_as
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function

SEQUENCE = Shard(2)
"""Placement that shards the sequence of [batch, heads, sequence, width]."""


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
    """Return attention, in the layout of ``inputs``.

    Args:
        redistributor: redistributes on the mesh.
        axis: the mesh axis that shards the sequence.
        inputs: query, key and value, in one layout.
        mask: mask of this rank's rows and all keys; None: no mask, or ``is_causal``.
        is_causal: whether each row sees the keys up to its own.
        scale: factor on the scores; None: one over the square root of the width.
        is_zigzag: whether the sequences of all inputs are in zigzag order; then there is no mask.
    """
    scale = inputs[0].shape[3] ** -0.5 if scale is None else scale
    result: DTensor = run_function(_ContextParallel, *inputs, mask, redistributor, axis, is_causal, scale, is_zigzag)
    return result


class _KernelCall(NamedTuple):
    """A call of the kernel: a slice of this rank's queries, a slice of all keys, and whether its mask is causal."""

    queries: slice
    keys: slice
    causal: bool


def _kernel_calls(chunks: ZigzagChunks | None, queries: int, keys: int) -> list[list[_KernelCall]]:
    """Return the kernel calls of each piece of this rank's queries.

    Args:
        chunks: chunks of the sequence; None: no causal mask.
        queries: number of this rank's queries.
        keys: number of keys of all ranks.
    """
    if chunks is None:
        return [[_KernelCall(slice(0, queries), slice(0, keys), causal=False)]]
    by_piece = []
    first = 0
    for chunk in chunks.zigzag:
        in_sequence = chunks.range(chunk)
        rows = slice(first, first + len(in_sequence))
        before = [_KernelCall(rows, slice(0, in_sequence.start), causal=False)] if in_sequence.start else []
        if in_sequence:
            by_piece.append([*before, _KernelCall(rows, slice(in_sequence.start, in_sequence.stop), causal=True)])
        first += len(in_sequence)
    return by_piece


class _ContextParallel(torch.autograd.Function):
    """The op in autograd. It saves this rank's rows, and no all-gathered tensor."""

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
        chunks = ZigzagChunks(group, ranks, redistributor.coordinate(axis), q.shape[2]) if is_causal else None
        ctx.redistributor, ctx.group, ctx.ranks, ctx.layout, ctx.scale = redistributor, group, ranks, layout, scale
        ctx.shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        ctx.chunks, ctx.is_zigzag = chunks, is_zigzag
        if chunks is not None and is_zigzag:
            result, lse = zigzag_attention.forward(q, k, v, chunks, scale)
            own = result
        else:
            q = q if chunks is None else chunks.to_zigzag(q)
            ctx.calls = _kernel_calls(chunks, q.shape[2], k.shape[2] * ranks)
            keys, values = _all_gather(k, v, group)
            result, lse = _forward(q, keys, values, mask, ctx.calls, scale)
            del keys, values
            own = result if chunks is None else chunks.to_contiguous(result)
        ctx.save_for_backward(q, k, v, mask, result, lse)
        shape = (*query.shape[:3], value.shape[3])
        return make_dtensor(own, redistributor.device_mesh, layout, shape, stride_as(own, shape, query))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 9
        redistributor: Redistributor = ctx.redistributor
        grad_out = local_of(redistributor.to_layout(redistributor.as_dtensor(gradient), ctx.layout))
        chunks: ZigzagChunks | None = ctx.chunks
        q, k, v, mask, result, lse = ctx.saved_tensors
        if chunks is not None and ctx.is_zigzag:
            grad_q, grad_k, grad_v = zigzag_attention.backward(grad_out, q, k, v, result, lse, chunks, ctx.scale)
        else:
            grad_out = grad_out if chunks is None else chunks.to_zigzag(grad_out)
            keys, values = _all_gather(k, v, ctx.group)
            grad_q, *addends = _backward(grad_out, q, keys, values, mask, result, lse, ctx.calls, ctx.scale)
            del keys, values
            grad_q = grad_q if chunks is None else chunks.to_contiguous(grad_q)
            grad_k, grad_v = _reduce_scatter(addends, (k.shape, v.shape), ctx.ranks, ctx.group)
        gradients = [
            make_dtensor(local.contiguous(), redistributor.device_mesh, ctx.layout, shape, contiguous_stride(shape))
            for local, shape in zip((grad_q, grad_k, grad_v), ctx.shapes, strict=True)
        ]
        return *gradients, None, None, None, None, None, None


def _all_gather(k: torch.Tensor, v: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all ranks' keys and values [batch, heads, all rows, width], in the order of ranks."""
    by_rank = KVAllGather(k, v, group).wait()
    keys, values = (torch.cat(each, 2) for each in by_rank)
    return keys, values


def _reduce_scatter(
    addends: list[torch.Tensor], shapes: tuple[torch.Size, torch.Size], ranks: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of the sums of ``addends`` over ranks.

    Args:
        addends: addends to the gradients of keys and of values, [batch, heads, all rows, width]. The list is emptied
            before the collective starts, which frees them.
        shapes: shapes of this rank's keys and values.
        ranks: number of ranks in the group.
        group: process group over which the addends are summed.
    """
    reduce_scatter = KVReduceScatter(shapes, ranks)
    for by_rank, addend, shape in zip(reduce_scatter.allocate(addends[0]), addends, shapes, strict=True):
        for piece, rows in zip(by_rank, addend.split(shape[2], 2), strict=True):
            piece.copy_(rows)
    addends.clear()
    reduce_scatter.start(group)
    return reduce_scatter.wait()


def _forward(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    pieces: list[list[_KernelCall]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result [batch, heads, rows, width] and its ``lse`` [batch, heads, rows], float32."""
    results = []
    for calls in pieces:
        combined: tuple[torch.Tensor, torch.Tensor] | None = None
        for call in calls:
            k, v = keys[:, :, call.keys], values[:, :, call.keys]
            part = attend(q[:, :, call.queries], k, v, mask, call.causal, scale)
            combined = part if combined is None else _combine(*combined, *part)
        assert combined is not None
        results.append(combined)
    if len(results) == 1:
        return results[0]
    return torch.cat([result for result, _ in results], 2), torch.cat([lse for _, lse in results], 2)


def _combine(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and lse of attention over two pieces of keys, given those over each piece."""
    weight = torch.sigmoid(second_lse - first_lse).unsqueeze(-1).to(first.dtype)
    return torch.lerp(first, second, weight), torch.logaddexp(first_lse, second_lse)


def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    result: torch.Tensor,
    lse: torch.Tensor,
    pieces: list[list[_KernelCall]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of this rank's queries, and its addends to the gradients of all keys and all values."""
    calls = [call for piece in pieces for call in piece]
    if len(calls) == 1:
        return attend_backward(grad_out, q, keys, values, mask, result, lse, calls[0].causal, scale)
    grad_q, grad_keys, grad_values = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    for call in calls:
        by_row = [tensor[:, :, call.queries] for tensor in (grad_out, q, result, lse)]
        k, v = keys[:, :, call.keys], values[:, :, call.keys]
        part = attend_backward(by_row[0], by_row[1], k, v, mask, by_row[2], by_row[3], call.causal, scale)
        grad_q[:, :, call.queries] += part[0]
        grad_keys[:, :, call.keys] += part[1]
        grad_values[:, :, call.keys] += part[2]
    return grad_q, grad_keys, grad_values
