"""Chunks of a sequence that is sharded over ranks, and their exchange between contiguous and zigzag order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from executor.torch_internals import dtensor as torch_internals
from planner.plan.token_order import chunk_range, zigzag_chunks


class ZigzagChunks(NamedTuple):
    """The 2n chunks of a sequence on the n ranks of an axis.

    In contiguous order rank r holds chunks 2r and 2r + 1, in zigzag order chunks r and 2n - 1 - r. So in both orders a
    rank holds one even-numbered and one odd-numbered chunk. If ``rows`` is odd, even-numbered chunks have one row fewer
    than odd-numbered chunks, and each rank has ``rows`` rows in both orders.

    Attributes:
        group: process group of the axis.
        ranks: number of ranks on the axis.
        rank: index of this rank on the axis.
        rows: number of rows (tokens of the sequence) on each rank.
    """

    group: Any
    ranks: int
    rank: int
    rows: int

    def range(self, chunk: int) -> range:
        """Return the rows of a chunk, as indices in the whole sequence."""
        return chunk_range(chunk, self.rows)

    def length(self, chunk: int) -> int:
        """Return the number of rows of a chunk."""
        return len(self.range(chunk))

    @property
    def contiguous(self) -> tuple[int, int]:
        """The chunks of this rank in contiguous order."""
        return 2 * self.rank, 2 * self.rank + 1

    @property
    def zigzag(self) -> tuple[int, int]:
        """The chunks of this rank in zigzag order."""
        return self.zigzag_of(self.rank)

    def zigzag_of(self, rank: int) -> tuple[int, int]:
        """Return the chunks of a rank in zigzag order."""
        return zigzag_chunks(rank, self.ranks)

    def to_zigzag(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows [batch, heads, rows, width] of this rank in zigzag order, given those in contiguous order."""
        return self._exchange(tensor, self.contiguous, self.zigzag, self._zigzag_rank, _contiguous_rank)

    def to_contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows [batch, heads, rows, width] of this rank in contiguous order, given those in zigzag order."""
        return self._exchange(tensor, self.zigzag, self.contiguous, _contiguous_rank, self._zigzag_rank)

    def _zigzag_rank(self, chunk: int) -> int:
        return min(chunk, 2 * self.ranks - 1 - chunk)

    def _exchange(
        self,
        tensor: torch.Tensor,
        before: tuple[int, int],
        after: tuple[int, int],
        rank_after: Callable[[int], int],
        rank_before: Callable[[int], int],
    ) -> torch.Tensor:
        """Return the rows of the chunks ``after``, given those of ``before``, by an all-to-all of whole chunks."""
        pieces = dict(zip(before, tensor.movedim(2, 0).split([self.length(chunk) for chunk in before]), strict=True))
        sent = sorted(before, key=lambda chunk: (rank_after(chunk), chunk))
        received = sorted(after, key=lambda chunk: (rank_before(chunk), chunk))
        sent_rows, received_rows = [0] * self.ranks, [0] * self.ranks
        for chunk in sent:
            sent_rows[rank_after(chunk)] += self.length(chunk)
        for chunk in received:
            received_rows[rank_before(chunk)] += self.length(chunk)
        sending = torch.cat([pieces[chunk] for chunk in sent])
        arrived = torch_internals.all_to_all(sending, self.group, received_rows, sent_rows)
        arrived_pieces = dict(zip(received, arrived.split([self.length(chunk) for chunk in received]), strict=True))
        # The heads of one row become adjacent in memory, as the surrounding module needs them.
        return torch.cat([arrived_pieces[chunk].transpose(0, 1) for chunk in after], 1).transpose(1, 2)


def _contiguous_rank(chunk: int) -> int:
    return chunk // 2
