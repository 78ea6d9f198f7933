"""Causal attention of one rank on sequences in zigzag order: one kernel over its own keys, two over other ranks' keys.

Rank r of n holds chunks r and 2n - 1 - r, one after the other, so attention among them is one causal kernel. It runs
during the all-gather of the other ranks' keys and values. Of these, the chunks that chunk 2n - 1 - r sees are
concatenated; the chunks that chunk r sees as well come first. So each of the two needs one kernel without a mask.

In the backward, the kernel over the rank's own keys runs for some heads during the all-gather of the other ranks' keys
and values, and for the remaining heads during the reduce-scatter of their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from executor.ops.attention_kernels import attend, attend_backward
from executor.ops.context_parallel.kv_all_gather import ByRank, KVAllGather, KVReduceScatter
from executor.ops.context_parallel.zigzag_chunks import ZigzagChunks
from planner.plan.token_order import backward_head_parts

_ChunkOfRank = tuple[int, bool]
"""(rank, whether it is the second of that rank's two chunks)."""


class _OtherChunks(NamedTuple):
    """The chunks of other ranks that this rank's rows see under the causal mask.

    Attributes:
        visible_chunks: chunks of other ranks that some row of this rank sees, in the order of their concatenation.
        hidden_chunks: all other chunks, including this rank's own.
        parts: (rows of this rank, rows of the concatenated chunks) of each kernel, later rows first.
        rows_without: the rows of this rank that see no chunk of another rank.
    """

    visible_chunks: list[_ChunkOfRank]
    hidden_chunks: list[_ChunkOfRank]
    parts: list[tuple[slice, slice]]
    rows_without: slice

    @classmethod
    def from_chunks(cls, chunks: ZigzagChunks) -> _OtherChunks:
        rank, (first, second) = chunks.rank, chunks.zigzag
        before, after = list(range(rank)), list(range(rank + 1, chunks.ranks))
        visible_chunks = [(other, False) for other in before + after] + [(other, True) for other in after]
        if not chunks.length(second):
            # This rank has one row. The row is in its first chunk, which sees the first chunks of lower ranks.
            visible_chunks = visible_chunks[:rank]
        hidden_chunks = [
            (other, is_second)
            for other in range(chunks.ranks)
            for is_second in (False, True)
            if (other, is_second) not in visible_chunks
        ]
        seen_by_both = sum(chunks.length(chunks.zigzag_of(other)[0]) for other in before)
        seen_by_second = sum(chunks.length(chunks.zigzag_of(other)[is_second]) for other, is_second in visible_chunks)
        middle = chunks.length(first)
        # The part over all visible keys comes first. The backward adds the other part's gradients of keys to it.
        parts = [(slice(middle, chunks.rows), slice(0, seen_by_second)), (slice(0, middle), slice(0, seen_by_both))]
        if seen_by_both == seen_by_second:
            parts = [(slice(0, chunks.rows), slice(0, seen_by_second))]
        parts = [(rows, keys) for rows, keys in parts if rows.stop > rows.start and keys.stop]
        return cls(
            visible_chunks, hidden_chunks, parts, slice(0, min((rows.start for rows, _ in parts), default=chunks.rows))
        )

    def concatenated(self, chunks: ZigzagChunks, by_rank: ByRank) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of the visible chunks."""
        keys, values = (torch.cat(_select(chunks, each, self.visible_chunks), 2) for each in by_rank)
        return keys, values


def _select(chunks: ZigzagChunks, by_rank: list[torch.Tensor], selected: list[_ChunkOfRank]) -> list[torch.Tensor]:
    """Return the ``selected`` chunks of tensors [batch, heads, rows, width] by rank."""
    pieces = []
    for rank, is_second in selected:
        middle = chunks.length(chunks.zigzag_of(rank)[0])
        rows = by_rank[rank]
        pieces.append(rows[:, :, middle:] if is_second else rows[:, :, :middle])
    return pieces


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: ZigzagChunks, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result [batch, heads, rows, width] and its ``lse`` [batch, heads, rows], float32."""
    all_gather, other_chunks = KVAllGather(k, v, chunks.group), _OtherChunks.from_chunks(chunks)
    own, own_lse = attend(q, k, v, None, True, scale)
    keys, values = other_chunks.concatenated(chunks, all_gather.wait())
    # Not in place: selective checkpointing saves what the kernel returned.
    result, lse = torch.empty_like(own), torch.empty_like(own_lse)
    for rows, key_rows in other_chunks.parts:
        part, part_lse = attend(q[:, :, rows], keys[:, :, key_rows], values[:, :, key_rows], None, False, scale)
        first, first_lse = own[:, :, rows], own_lse[:, :, rows]
        weight = torch.sigmoid(part_lse - first_lse).unsqueeze(-1).to(part.dtype)
        torch.lerp(first, part, weight, out=result[:, :, rows])
        torch.logaddexp(first_lse, part_lse, out=lse[:, :, rows])
        del part, part_lse, weight
    result[:, :, other_chunks.rows_without] = own[:, :, other_chunks.rows_without]
    lse[:, :, other_chunks.rows_without] = own_lse[:, :, other_chunks.rows_without]
    return result, lse


def backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: torch.Tensor,
    lse: torch.Tensor,
    chunks: ZigzagChunks,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's q, k and v, given the ``gradient`` of its result.

    Args:
        gradient, q, result: [batch, heads, rows, width].
        k, v: [batch, kv_heads, rows, width].
        lse: [batch, heads, rows], float32; ``result`` and ``lse`` are what `forward` returned.
    """
    all_gather, other_chunks = KVAllGather(k, v, chunks.group), _OtherChunks.from_chunks(chunks)
    head_parts = [
        (slice(heads.start, heads.stop), slice(kv_heads.start, kv_heads.stop))
        for heads, kv_heads in backward_head_parts(q.shape[1], k.shape[1])
    ]

    def over_own_keys(heads: slice, kv_heads: slice) -> tuple[torch.Tensor, ...]:
        grad_out, queries, out, out_lse = (tensor[:, heads] for tensor in (gradient, q, result, lse))
        return attend_backward(grad_out, queries, k[:, kv_heads], v[:, kv_heads], None, out, out_lse, True, scale)

    own = [over_own_keys(*head_parts[0])]
    reduce_scatter, grad_rows = _over_other_keys((gradient, q, result, lse), all_gather, other_chunks, chunks, scale)
    reduce_scatter.start(chunks.group)
    own += [over_own_keys(*part) for part in head_parts[1:]]
    grad_kv = reduce_scatter.wait()
    grad_q = torch.empty_like(q)
    for (heads, kv_heads), (own_grad_q, *own_grad_kv) in zip(head_parts, own, strict=True):
        for rows, addend in grad_rows:
            torch.add(own_grad_q[:, :, rows], addend[:, heads], out=grad_q[:, heads, rows])
        grad_q[:, heads, other_chunks.rows_without] = own_grad_q[:, :, other_chunks.rows_without]
        for total, addend in zip(grad_kv, own_grad_kv, strict=True):
            total[:, kv_heads] += addend
    return grad_q, *grad_kv


def _over_other_keys(
    by_row: tuple[torch.Tensor, ...],
    all_gather: KVAllGather,
    other_chunks: _OtherChunks,
    chunks: ZigzagChunks,
    scale: float,
) -> tuple[KVReduceScatter, list[tuple[slice, torch.Tensor]]]:
    """Return a reduce-scatter that is ready to start, and the gradient of queries as [(rows, their gradient)].

    The reduce-scatter holds this rank's addends to the gradients of all ranks' keys and values, from the kernels over
    other ranks' keys.

    Args:
        by_row: the result's gradient, the queries, the result and its lse, of this rank.
        all_gather: the all-gather of keys and values.
        other_chunks: the chunks of other ranks that this rank's rows see.
        chunks: the chunks of the sequence.
        scale: factor on the scores.
    """
    reduce_scatter = KVReduceScatter(all_gather.shapes, chunks.ranks)
    keys, values = other_chunks.concatenated(chunks, all_gather.wait())
    grad_rows: list[tuple[slice, torch.Tensor]] = []
    grad_seen: list[torch.Tensor] = []
    grad_kv: list[torch.Tensor] = []
    for rows, key_rows in other_chunks.parts:
        grad_out, queries, out, out_lse = (tensor[:, :, rows] for tensor in by_row)
        grad_queries, *grad_kv = attend_backward(
            grad_out, queries, keys[:, :, key_rows], values[:, :, key_rows], None, out, out_lse, False, scale
        )
        grad_rows.append((rows, grad_queries))
        if not grad_seen:
            grad_seen = grad_kv
            continue
        for total, addend in zip(grad_seen, grad_kv, strict=True):
            total[:, :, key_rows] += addend
            del addend
    del keys, values, grad_kv
    visible_chunks, zero_chunks = (
        (other_chunks.visible_chunks, other_chunks.hidden_chunks)
        if grad_seen
        else ([], [*other_chunks.visible_chunks, *other_chunks.hidden_chunks])
    )
    for index, by_rank in enumerate(reduce_scatter.allocate(by_row[1])):
        for piece in _select(chunks, by_rank, zero_chunks):
            piece.zero_()
        pieces = _select(chunks, by_rank, visible_chunks)
        totals = grad_seen[index].split([piece.shape[2] for piece in pieces], 2) if grad_seen else ()
        for piece, total in zip(pieces, totals, strict=True):
            piece.copy_(total)
    return reduce_scatter, grad_rows
