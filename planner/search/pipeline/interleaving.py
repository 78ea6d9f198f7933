"""Interleaved pipelines: how many chunks of the model each rank has, and how many blocks are in each.

Chunk ``i`` of rank ``r`` of ``p`` is chunk ``r + i p`` of the model (arXiv 2104.04473, section 2.2). As in Megatron the
micro-batches are a multiple of the ranks and all chunks are of one size, where embedding and head may each count as a
block (``account_for_embedding_in_pipeline_split``, ``account_for_loss_in_pipeline_split``): then the first chunk or the
last has one block less.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from planner.search.pipeline.partition import slowest

Role = Literal["first", "middle", "last"]


def role_of(rank: int, ranks: int) -> Role:
    """Return what a rank of a pipeline has beside blocks: what comes before them all, what comes after, or nothing."""
    return "first" if rank == 0 else "last" if rank == ranks - 1 else "middle"


def interleaved(
    blocks: int, ranks: int, first: float = 0.0, last: float = 0.0, *, ends_alone: bool = True
) -> tuple[tuple[int, ...], int] | None:
    """Return the blocks of each rank and the chunks that it has them in: as many as can be; None where that is one.

    Of two ranks only one may have an end of the model for a chunk: they would wait for each other.

    Args:
        blocks: equal blocks to be spread over the ranks.
        ranks: two at least.
        first, last: the work of the first and the last rank beside their blocks, in blocks. Where embedding or head
            could count as the block that makes all chunks equal, that leaves the slowest rank less.
        ends_alone: whether a chunk may be embedding or head without any block.
    """
    for chunks in range((blocks + 2) // ranks, 1, -1):
        found = []
        for fewer in itertools.product((0, 1), repeat=2):
            size, left = divmod(blocks + sum(fewer), ranks * chunks)
            if not left and (size > 1 or sum(fewer) < (ranks if ends_alone else 1)):
                counts = [size * chunks] * ranks
                counts[0] -= fewer[0]
                counts[-1] -= fewer[1]
                found.append(tuple(counts))
        if found:
            return min(found, key=lambda counts: slowest(counts, first, last)), chunks
    return None


def chunk_sizes(role: Role, blocks: int, chunks: int) -> tuple[int, ...]:
    """Return the blocks of each chunk of a rank with so many ``blocks``: the first or the last may have one less."""
    size = -(-blocks // chunks)
    sizes = [size] * chunks
    if role != "middle":
        sizes[0 if role == "first" else -1] -= size * chunks - blocks
    return tuple(sizes)


def placed_in_model(counts: Sequence[int], chunks: int, rank: int) -> list[int]:
    """Return the numbers of the blocks that ``rank`` has, given the blocks of each rank."""
    sizes = [chunk_sizes(role_of(other, len(counts)), count, chunks) for other, count in enumerate(counts)]
    found, start = list[int](), 0
    for chunk, other in itertools.product(range(chunks), range(len(counts))):
        if other == rank:
            found += range(start, start + sizes[other][chunk])
        start += sizes[other][chunk]
    return found
