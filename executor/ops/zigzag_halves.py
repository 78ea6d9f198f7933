"""Halves of a sequence that is split over ranks: who holds which, who works on which, and their exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from executor import torch_internals
from planner.plan.token_order import chunk_range, zigzag_chunks


class Halves(NamedTuple):
    """The halves of a sequence on the ranks of an axis, and their exchange.

    Of 2n halves, rank r holds 2r and 2r + 1, and works on r and 2n - 1 - r: one first and one second half, as both are
    never even. Where a rank has an odd number of rows, its first half has one fewer.
    """

    group: Any
    ranks: int
    rank: int
    rows: int

    def range(self, half: int) -> range:
        """Return the rows of a half, in the whole sequence."""
        return chunk_range(half, self.rows)

    def length(self, half: int) -> int:
        """Return the rows of a half."""
        return len(self.range(half))

    @property
    def own(self) -> tuple[int, int]:
        """The halves that this rank holds when nothing is exchanged."""
        return 2 * self.rank, 2 * self.rank + 1

    @property
    def even(self) -> tuple[int, int]:
        """The halves that make work even."""
        return self.even_of(self.rank)

    def even_of(self, rank: int) -> tuple[int, int]:
        """Return those of another rank."""
        return zigzag_chunks(rank, self.ranks)

    def _worker(self, half: int) -> int:
        return min(half, 2 * self.ranks - 1 - half)

    def to_even(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows ``[batch, heads, rows, width]`` of the even halves, one after the other."""
        return self._exchange(tensor, self.own, self.even, self._worker, lambda half: half // 2)

    def to_own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Undo ``to_even``."""
        return self._exchange(tensor, self.even, self.own, lambda half: half // 2, self._worker)

    def _exchange(
        self,
        tensor: torch.Tensor,
        held: tuple[int, int],
        wanted: tuple[int, int],
        target: Callable[[int], int],
        source: Callable[[int], int],
    ) -> torch.Tensor:
        pieces = dict(zip(held, tensor.movedim(2, 0).split([self.length(half) for half in held]), strict=True))
        sending, arriving = sorted(held, key=lambda h: (target(h), h)), sorted(wanted, key=lambda h: (source(h), h))
        out, into = [0] * self.ranks, [0] * self.ranks
        for half in sending:
            out[target(half)] += self.length(half)
        for half in arriving:
            into[source(half)] += self.length(half)
        sent = torch.cat([pieces[half] for half in sending])
        arrived = torch_internals.all_to_all(sent, self.group, into, out)
        got = dict(zip(arriving, arrived.split([self.length(half) for half in arriving]), strict=True))
        # Heads lie next to each other, as the module around wants them.
        return torch.cat([got[half].transpose(0, 1) for half in wanted], 1).transpose(1, 2)
