"""Megatron's interleaved 1F1B (arXiv 2104.04473, section 2.2) pass by pass, to hold prices of steps against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_Pass = tuple[str, int, int]
"""("forward" or "backward", chunk, micro-batch)."""


def simulated_s(forward_s: Sequence[Sequence[float]], micro_batches: int) -> float:
    """Return the seconds of all passes, messages aside; a backward takes twice as long as its forward.

    Args:
        forward_s: of each chunk of each rank, which all have as many.
        micro_batches: a multiple of the ranks.
    """
    ranks, chunks = len(forward_s), len(forward_s[0])
    left = [list(_passes(rank, ranks, chunks, micro_batches)) for rank in range(ranks)]
    ended: dict[tuple[int, _Pass], float] = {}
    clock = [0.0] * ranks
    while any(left):
        for rank, passes in enumerate(left):
            while passes:
                needed = _needed(rank, passes[0], ranks, chunks)
                if needed is not None and needed not in ended:
                    break
                what, chunk, _ = passes[0]
                start = max(clock[rank], 0.0 if needed is None else ended[needed])
                clock[rank] = start + forward_s[rank][chunk] * (1 if what == "forward" else 2)
                ended[rank, passes.pop(0)] = clock[rank]
    return max(clock)


def most_held(rank: int, ranks: int, chunks: int, micro_batches: int, *, empty: int | None = None) -> int:
    """Return the most passes forward whose backward is to come, those of the chunk ``empty`` not counted."""
    held = most = 0
    for what, chunk, _ in _passes(rank, ranks, chunks, micro_batches):
        if chunk != empty:
            held += 1 if what == "forward" else -1
            most = max(most, held)
    return most


def _passes(rank: int, ranks: int, chunks: int, micro_batches: int) -> Iterator[_Pass]:
    """Yield what a rank runs, in its order: some forwards first, then one of each in turn."""
    total = micro_batches * chunks
    first = min(total, (ranks - rank - 1) * 2 + (chunks - 1) * ranks)

    def numbered(what: str, number: int) -> _Pass:
        group, within = divmod(number, ranks * chunks)
        chunk = within // ranks if what == "forward" else chunks - 1 - within // ranks
        return what, chunk, group * ranks + within % ranks

    yield from (numbered("forward", number) for number in range(first))
    for number in range(total):
        if first + number < total:
            yield numbered("forward", first + number)
        yield numbered("backward", number)


def _needed(rank: int, one: _Pass, ranks: int, chunks: int) -> tuple[int, _Pass] | None:
    """Return the pass, and its rank, whose result ``one`` reads."""
    what, chunk, number = one
    if what == "forward":
        return None if rank == chunk == 0 else ((rank - 1) % ranks, (what, chunk - (rank == 0), number))
    if rank == ranks - 1 and chunk == chunks - 1:
        return rank, ("forward", chunk, number)
    return (rank + 1) % ranks, (what, chunk + (rank == ranks - 1), number)
