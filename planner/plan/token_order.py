"""Zigzag token order for causal context parallelism: it gives all ranks of an axis equal work under a causal mask.

A sequence has 2n chunks on an axis of n ranks. Rank r holds chunks r and 2n - 1 - r. If ids and positions enter the
model in that order, ops on single tokens are unaffected, and attention exchanges no queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ZigzagOrder:
    """Zigzag order of the sequences throughout a model, and the values that are reordered at its boundaries.

    Attributes:
        axis: of the mesh, the one that attention's sequence is split on.
        length: of a sequence, in tokens.
        inputs: module FQN pattern + ".input" -> argument -> the dim that is put into zigzag order.
        outputs: module FQN pattern -> result -> dim, likewise.
    """

    axis: str
    length: int
    inputs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def zigzag_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return the two chunks, of ``2 * ranks``, that a rank holds."""
    return rank, 2 * ranks - 1 - rank


def chunk_range(half: int, rows: int) -> range:
    """Return the tokens of a chunk, where each rank holds ``rows``; of an odd number the first chunk has one fewer."""
    first = half // 2 * rows
    middle = first + rows // 2
    return range(middle, first + rows) if half % 2 else range(first, middle)


def zigzag_indices(length: int, ranks: int) -> list[int]:
    """Return the token at each position of the zigzag order of ``length`` tokens, a multiple of ``ranks``."""
    rows = length // ranks
    return [token for rank in range(ranks) for half in zigzag_chunks(rank, ranks) for token in chunk_range(half, rows)]


def backward_head_parts(heads: int, kv_heads: int) -> list[tuple[range, range]]:
    """Return (heads, key heads) whose own keys run before the other ranks' keys in the backward, and those after.

    About half each; a single head runs before.
    """
    if kv_heads > 1:
        middle, group = -(-kv_heads // 2), heads // kv_heads
        return [
            (range(middle * group), range(middle)),
            (range(middle * group, heads), range(middle, kv_heads)),
        ]
    middle = -(-heads // 2)
    parts = [(range(middle), range(kv_heads)), (range(middle, heads), range(kv_heads))]
    return [(head_range, kv_range) for head_range, kv_range in parts if head_range]
