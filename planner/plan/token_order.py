"""The order of a sequence in which ranks that hold a part of it each do the same work under a causal mask.

Of n ranks on an axis that splits sequences, each in 2n halves, rank r has halves r and 2n - 1 - r: what it sees of all
keys is then as much as any other rank sees. Where ids come into the model in that order, and positions with them, all
that works token by token stays as it is, and attention has nothing to exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ZigzagOrder:
    """Sequences in an even order throughout the model, and where they are brought into it.

    Attributes:
        axis: of the mesh, the one that attention's sequence is split on.
        length: of a sequence, in tokens.
        inputs: module FQN pattern + ".input" -> argument -> the dim that is brought in order.
        outputs: module FQN pattern -> result -> dim, likewise.
    """

    axis: str
    length: int
    inputs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def zigzag_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return the halves, of ``2 * ranks``, that a rank has in the even order."""
    return rank, 2 * ranks - 1 - rank


def chunk_range(half: int, rows: int) -> range:
    """Return the rows of a half, where each rank has ``rows``: of an odd number the first half has one fewer."""
    first = half // 2 * rows
    middle = first + rows // 2
    return range(middle, first + rows) if half % 2 else range(first, middle)


def zigzag_indices(length: int, ranks: int) -> list[int]:
    """Return which token is at each place of a sequence of ``length``, a multiple of ``ranks``, in the even order."""
    rows = length // ranks
    return [token for rank in range(ranks) for half in zigzag_chunks(rank, ranks) for token in chunk_range(half, rows)]


def backward_head_parts(heads: int, kv_heads: int) -> list[tuple[range, range]]:
    """Return for which heads, and heads of keys, a rank's own keys run in the backward before the others', and after.

    About half each; all before where there is one head.
    """
    if kv_heads > 1:
        middle, group = -(-kv_heads // 2), heads // kv_heads
        return [
            (range(middle * group), range(middle)),
            (range(middle * group, heads), range(middle, kv_heads)),
        ]
    middle = -(-heads // 2)
    found = [(range(middle), range(kv_heads)), (range(middle, heads), range(kv_heads))]
    return [(some, of_keys) for some, of_keys in found if some]
