"""Causal attention of one rank whose sequences are in an even order: its own keys first, then those of the others.

Rank r of n holds halves r and 2n - 1 - r, one after the other, so that attention among them is one causal kernel. It
runs while other ranks' keys and values are gathered. Of those, all that half 2n - 1 - r sees are put one after the
other, and first what half r sees as well: a kernel for each of the two, with no mask. The backward runs one over its
own keys for some of the heads while the others' keys are gathered, and one for the rest of the heads while the
gradients of the others' keys are on their way to them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from executor.ops.attention_kernels import attend, attend_backward
from executor.ops.kv_all_gather import ByRank, Gathering, Scattering
from executor.ops.zigzag_halves import Halves
from planner.plan.token_order import backward_head_parts


class _Others(NamedTuple):
    """What this rank sees of the others' halves.

    Attributes:
        seen, unseen: halves, as (rank, whether it is that rank's second); those seen in the order that they are put in.
        parts: (rows of this rank, rows of those halves): each a call of the kernel, the last rows first.
        left: the rows of this rank that see nothing of the others.
    """

    seen: list[tuple[int, bool]]
    unseen: list[tuple[int, bool]]
    parts: list[tuple[slice, slice]]
    left: slice

    @classmethod
    def of(cls, halves: Halves) -> _Others:
        rank, (first, second) = halves.rank, halves.even
        before, after = list(range(rank)), list(range(rank + 1, halves.ranks))
        seen = [(other, False) for other in before + after] + [(other, True) for other in after]
        if not halves.length(second):  # a single row, in the first half
            seen = seen[:rank]
        unseen = [(other, of) for other in range(halves.ranks) for of in (False, True) if (other, of) not in seen]
        both = sum(halves.length(halves.even_of(other)[0]) for other in before)
        every = sum(halves.length(halves.even_of(other)[is_second]) for other, is_second in seen)
        middle = halves.length(first)
        # All keys come first: what this leaves of their gradients is what the other part adds to.
        parts = [(slice(middle, halves.rows), slice(0, every)), (slice(0, middle), slice(0, both))]
        if both == every:
            parts = [(slice(0, halves.rows), slice(0, every))]
        parts = [(rows, keys) for rows, keys in parts if rows.stop > rows.start and keys.stop]
        return cls(seen, unseen, parts, slice(0, min((rows.start for rows, _ in parts), default=halves.rows)))

    def joined(self, halves: Halves, by_rank: ByRank) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the halves that are seen, one after the other."""
        keys, values = (torch.cat(_pick(halves, each, self.seen), 2) for each in by_rank)
        return keys, values


def _pick(halves: Halves, by_rank: list[torch.Tensor], wanted: list[tuple[int, bool]]) -> list[torch.Tensor]:
    """Return the ``wanted`` halves of pieces [batch, heads, rows, width] by rank."""
    found = []
    for rank, is_second in wanted:
        middle = halves.length(halves.even_of(rank)[0])
        piece = by_rank[rank]
        found.append(piece[:, :, middle:] if is_second else piece[:, :, :middle])
    return found


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, halves: Halves, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result [batch, heads, rows, width] and the logarithms of sums [batch, heads, rows], float32."""
    gathering, others = Gathering(k, v, halves.group), _Others.of(halves)
    own, own_sums = attend(q, k, v, None, True, scale)
    keys, values = others.joined(halves, gathering.wait())
    # What the kernel made stays as it is: selective checkpointing keeps it.
    result, sums = torch.empty_like(own), torch.empty_like(own_sums)
    for rows, seen in others.parts:
        one, one_sums = attend(q[:, :, rows], keys[:, :, seen], values[:, :, seen], None, False, scale)
        first, first_sums = own[:, :, rows], own_sums[:, :, rows]
        share = torch.sigmoid(one_sums - first_sums).unsqueeze(-1).to(one.dtype)
        torch.lerp(first, one, share, out=result[:, :, rows])
        torch.logaddexp(first_sums, one_sums, out=sums[:, :, rows])
        del one, one_sums, share
    result[:, :, others.left] = own[:, :, others.left]
    sums[:, :, others.left] = own_sums[:, :, others.left]
    return result, sums


def backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: torch.Tensor,
    sums: torch.Tensor,
    halves: Halves,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's queries, keys and values, given that of the result."""
    gathering, others = Gathering(k, v, halves.group), _Others.of(halves)
    parts = [
        (slice(heads.start, heads.stop), slice(kv_heads.start, kv_heads.stop))
        for heads, kv_heads in backward_head_parts(q.shape[1], k.shape[1])
    ]

    def over_own(heads: slice, kv_heads: slice) -> tuple[torch.Tensor, ...]:
        arrived, queries, found, found_sums = (tensor[:, heads] for tensor in (gradient, q, result, sums))
        return attend_backward(arrived, queries, k[:, kv_heads], v[:, kv_heads], None, found, found_sums, True, scale)

    own = [over_own(*parts[0])]
    scattering, of_rows = _over_others((gradient, q, result, sums), gathering, others, halves, scale)
    scattering.start(halves.group)
    own += [over_own(*part) for part in parts[1:]]
    totals = scattering.wait()
    of_q = torch.empty_like(q)
    for (heads, kv_heads), (of_heads, *of_keys) in zip(parts, own, strict=True):
        for rows, addend in of_rows:
            torch.add(of_heads[:, :, rows], addend[:, heads], out=of_q[:, heads, rows])
        of_q[:, heads, others.left] = of_heads[:, :, others.left]
        for total, addend in zip(totals, of_keys, strict=True):
            total[:, kv_heads] += addend
    return of_q, *totals


def _over_others(
    by_row: tuple[torch.Tensor, ...],
    gathering: Gathering,
    others: _Others,
    halves: Halves,
    scale: float,
) -> tuple[Scattering, list[tuple[slice, torch.Tensor]]]:
    """Return the gradients that other ranks' keys have here, to be sent, and what they leave to rows of queries.

    Args:
        by_row: of this rank: the result's gradient, queries, the result, its sums.
    """
    scattering = Scattering(gathering.shapes, halves.ranks)
    keys, values = others.joined(halves, gathering.wait())
    of_rows: list[tuple[slice, torch.Tensor]] = []
    of_seen: list[torch.Tensor] = []
    of_keys: list[torch.Tensor] = []
    for rows, seen in others.parts:
        arrived, queries, found, found_sums = (tensor[:, :, rows] for tensor in by_row)
        addend, *of_keys = attend_backward(
            arrived, queries, keys[:, :, seen], values[:, :, seen], None, found, found_sums, False, scale
        )
        of_rows.append((rows, addend))
        if not of_seen:
            of_seen = of_keys
            continue
        for total, more in zip(of_seen, of_keys, strict=True):
            total[:, :, seen] += more
            del more
    del keys, values, of_keys
    for index, by_rank in enumerate(scattering.addends(by_row[1])):
        for piece in _pick(halves, by_rank, others.seen if not of_seen else []) + _pick(halves, by_rank, others.unseen):
            piece.zero_()
        pieces = _pick(halves, by_rank, others.seen if of_seen else [])
        totals = of_seen[index].split([piece.shape[2] for piece in pieces], 2) if of_seen else ()
        for piece, total in zip(pieces, totals, strict=True):
            piece.copy_(total)
    return scattering, of_rows
