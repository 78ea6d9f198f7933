"""Interleaved pipelines: the number of chunks of the model on each rank, and of blocks in each chunk.

Chunk ``i`` of rank ``r`` of ``p`` is chunk ``r + i p`` of the model (arXiv 2104.04473, section 2.2). As in Megatron,
the number of micro-batches is a multiple of the ranks and all chunks have one size. Embedding and head may each count
as a block (``account_for_embedding_in_pipeline_split``, ``account_for_loss_in_pipeline_split``): then the first or the
last chunk has one block less.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from planner.search.pipeline.partition import slowest

Role = Literal["first", "middle", "last"]


def role_of(rank: int, ranks: int) -> Role:
    """Return whether a rank has what runs before all blocks, what runs after them, or blocks alone."""
    return "first" if rank == 0 else "last" if rank == ranks - 1 else "middle"


def interleaved(
    blocks: int, ranks: int, first: float = 0.0, last: float = 0.0, *, ends_alone: bool = True
) -> tuple[tuple[int, ...], int] | None:
    """Return (blocks of each rank, chunks of each rank), with as many chunks as possible; None where that is one.

    Of two ranks only one may have a chunk without any block: they would wait for each other.

    Args:
        blocks: number of equal blocks to be spread over the ranks.
        ranks: two at least.
        first: time of what the first rank runs before all blocks, in blocks.
        last: time of what the last rank runs after all blocks, in blocks. Where either embedding or head could count as
            the block that makes all chunks equal, the choice makes the slowest rank as fast as possible.
        ends_alone: whether a chunk may be embedding or head without any block.
    """
    for chunks in range((blocks + 2) // ranks, 1, -1):
        splits = []
        for fewer in itertools.product((0, 1), repeat=2):
            size, left = divmod(blocks + sum(fewer), ranks * chunks)
            if not left and (size > 1 or sum(fewer) < (ranks if ends_alone else 1)):
                counts = [size * chunks] * ranks
                counts[0] -= fewer[0]
                counts[-1] -= fewer[1]
                splits.append(tuple(counts))
        if splits:
            return min(splits, key=lambda counts: slowest(counts, first, last)), chunks
    return None


def chunk_sizes(role: Role, blocks: int, chunks: int) -> tuple[int, ...]:
    """Return the number of blocks of each chunk of a rank with so many ``blocks``."""
    size = -(-blocks // chunks)
    sizes = [size] * chunks
    if role != "middle":
        sizes[0 if role == "first" else -1] -= size * chunks - blocks
    return tuple(sizes)


def placed_in_model(counts: Sequence[int], chunks: int, rank: int) -> list[int]:
    """Return the indices in the model of the blocks that ``rank`` has, given the number of blocks of each rank."""
    sizes = [chunk_sizes(role_of(other, len(counts)), count, chunks) for other, count in enumerate(counts)]
    placed, start = list[int](), 0
    for chunk, other in itertools.product(range(chunks), range(len(counts))):
        if other == rank:
            placed += range(start, start + sizes[other][chunk])
        start += sizes[other][chunk]
    return placed
