"""Zigzag token order for causal context parallelism: it gives all ranks of an axis equal work under a causal mask.

A sequence has 2n chunks on an axis of n ranks. Rank r holds chunks r and 2n - 1 - r. If ids and positions enter the
model in that order, ops on single tokens are unaffected, and attention exchanges no queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ZigzagOrder:
    """Zigzag order of the sequences throughout a model, and the tensors that are put into it at module boundaries.

    Attributes:
        axis: name of the mesh axis over which attention's sequences are sharded.
        length: tokens in a sequence.
        inputs: module FQN pattern + ".input" -> argument -> the dim of the argument that is put into zigzag order.
        outputs: module FQN pattern -> result -> the dim of the result that is put into zigzag order.
    """

    axis: str
    length: int
    inputs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def zigzag_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return the indices of the two chunks, out of ``2 * ranks``, that a rank holds."""
    return rank, 2 * ranks - 1 - rank


def chunk_range(chunk: int, rows: int) -> range:
    """Return the tokens of ``chunk``, where chunks 2i and 2i + 1 have ``rows`` tokens together.

    If ``rows`` is odd, chunk 2i has one token less than chunk 2i + 1.
    """
    first = chunk // 2 * rows
    middle = first + rows // 2
    return range(middle, first + rows) if chunk % 2 else range(first, middle)


def zigzag_indices(length: int, ranks: int) -> list[int]:
    """Return the index of the token at each position in zigzag order; ``length`` is a multiple of ``ranks``."""
    rows = length // ranks
    return [
        token for rank in range(ranks) for chunk in zigzag_chunks(rank, ranks) for token in chunk_range(chunk, rows)
    ]


def backward_head_parts(heads: int, kv_heads: int) -> list[tuple[range, range]]:
    """Return (query heads, key-value heads) of both parts of the attention backward over a rank's own keys.

    The first part runs while other ranks' keys are all-gathered, the second while the gradients of other ranks' keys
    are reduce-scattered. Each part has about half of the heads. A single head is all in the first part.
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
