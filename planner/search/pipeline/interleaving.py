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
    """Return the role of a rank: the first also runs the ops before all blocks, the last the ops after all blocks."""
    return "first" if rank == 0 else "last" if rank == ranks - 1 else "middle"


def interleaved(
    blocks: int, ranks: int, first: float = 0.0, last: float = 0.0, *, ends_alone: bool = True
) -> tuple[tuple[int, ...], int] | None:
    """Return (number of blocks of each rank, chunks per rank) with as many chunks as possible; None if that is one.

    If either embedding or head could count as the block that makes all chunks equal, the result is the split whose
    slowest rank is faster. With two ranks only one of them may have a chunk without blocks. Otherwise the two would
    wait for each other.

    Args:
        blocks: number of equal blocks to be spread over the ranks.
        ranks: number of ranks, two at least.
        first: time of the ops before all blocks, in units of one block's time.
        last: time of the ops after all blocks, in units of one block's time.
        ends_alone: whether a chunk may be the embedding or the head without any block.
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
    """Return the number of blocks in each chunk of a rank that has ``blocks`` blocks in all."""
    size = -(-blocks // chunks)
    sizes = [size] * chunks
    if role != "middle":
        sizes[0 if role == "first" else -1] -= size * chunks - blocks
    return tuple(sizes)


def placed_in_model(counts: Sequence[int], chunks: int, rank: int) -> list[int]:
    """Return the model's indices of the blocks on ``rank``; ``counts`` is the number of blocks of each rank."""
    sizes = [chunk_sizes(role_of(other, len(counts)), count, chunks) for other, count in enumerate(counts)]
    placed, start = list[int](), 0
    for chunk, other in itertools.product(range(chunks), range(len(counts))):
        if other == rank:
            placed += range(start, start + sizes[other][chunk])
        start += sizes[other][chunk]
    return placed
