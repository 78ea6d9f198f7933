"""How an interleaved pipeline spreads blocks over the chunks of its ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.search.pipeline.interleaving import chunk_sizes, interleaved, placed_in_model, role_of


@pytest.mark.parametrize(
    ("blocks", "ranks", "found"),
    [
        (32, 4, ((8, 8, 8, 8), 8)),
        # Megatron's Llama-3.1 405B: embedding and head count as a block each.
        (126, 8, ((15, *[16] * 6, 15), 16)),
        (7, 2, ((4, 3), 4)),
        (5, 4, None),
        (32, 32, None),
    ],
)
def test_blocks_are_spread_as_megatron_does(blocks: int, ranks: int, found: tuple[tuple[int, ...], int] | None) -> None:
    assert interleaved(blocks, ranks) == found


def test_the_heavier_end_counts_as_a_block() -> None:
    assert interleaved(11, 3, first=1.0) == ((3, 4, 4), 4)
    assert interleaved(11, 3, last=1.0) == ((4, 4, 3), 4)


@given(st.integers(2, 130), st.integers(2, 16))
def test_every_chunk_but_the_ends_has_blocks_and_no_more_chunks_would_do(blocks: int, ranks: int) -> None:
    if blocks < ranks:
        return
    found = interleaved(blocks, ranks)
    counts, chunks = found or ((), 1)
    if found is not None:
        sizes = [chunk_sizes(role_of(rank, ranks), count, chunks) for rank, count in enumerate(counts)]
        assert [sum(of_rank) for of_rank in sizes] == list(counts)
        in_order = [sizes[rank][chunk] for chunk, rank in itertools.product(range(chunks), range(ranks))]
        assert min(in_order[1:-1]) >= 1
        assert len(set(in_order[1:-1])) == 1
        assert {in_order[1] - in_order[0], in_order[1] - in_order[-1]} <= {0, 1}
        placed = [placed_in_model(counts, chunks, rank) for rank in range(ranks)]
        assert sorted(itertools.chain(*placed)) == list(range(blocks))
        assert placed[1][: sizes[1][0]] == list(range(sizes[0][0], sizes[0][0] + sizes[1][0]))
    for more, first, last in itertools.product(range(chunks + 1, blocks + 2), (0, 1), (0, 1)):
        size, left = divmod(blocks + first + last, ranks * more)
        assert left or size < 1 or first + last == ranks
