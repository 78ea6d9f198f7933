"""Rows of experts: which tokens go to which expert on this rank, and to ranks that hold other experts and back.

A *row* is a token at one of its experts; rows are sorted by expert. On meta, where nobody knows which expert a token
chose, experts are equally busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Shard

from cost_model.layouts.layout import Layout
from executor import torch_internals
from executor.ops.embedding import split_offset
from executor.redistribute import Redistributor


class Rows(NamedTuple):
    """A rank's rows: the place of each among all that the tokens chose, and how many each expert has."""

    choice: torch.Tensor
    counts: torch.Tensor
    chosen: int

    @property
    def token(self) -> torch.Tensor:
        return self.choice // self.chosen

    @classmethod
    def of(cls, index: torch.Tensor, first: int, experts: int, all_experts: int) -> Rows:
        """Return the rows of ``index`` [tokens, chosen] at ``experts`` experts from ``first`` on."""
        chosen = index.reshape(-1) - first
        if chosen.is_meta:
            rows = -(-chosen.numel() * experts // all_experts)
            choice, counts = chosen.new_empty(rows), chosen.new_empty(experts)
        else:
            elsewhere = (chosen < 0) | (chosen >= experts)
            chosen = chosen.masked_fill(elsewhere, experts)
            counts = torch.bincount(chosen, minlength=experts + 1)[:experts]
            order = chosen.argsort(stable=True)
            # Where this rank has all experts their number is known, and no GPU is waited for.
            choice = order if experts == all_experts else order[: int(counts.sum())]
        return cls(choice=choice, counts=counts, chosen=index.shape[1])


class Exchange(NamedTuple):
    """The ranks of an axis that hold tokens and experts, and what passes between them.

    Attributes:
        group: of the axis.
        sizes: [2, ranks], on the CPU: rows that go to each rank, and that come from each; of length 0 on meta, where
            all are equal.
        order: which of the rows that came is next when they are sorted by expert.
    """

    group: Any
    sizes: torch.Tensor
    order: torch.Tensor

    def to_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows that came from all ranks, by expert, where each sends its own ``rows`` [rows, ...]."""
        sent, arriving = self._splits()
        return torch_internals.all_to_all(rows, self.group, arriving, sent)[self.order]

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Undo ``to_experts``."""
        sent, arriving = self._splits()
        placed = torch.empty_like(rows)
        placed[self.order] = rows
        return torch_internals.all_to_all(placed, self.group, sent, arriving)

    def _splits(self) -> tuple[list[int] | None, list[int] | None]:
        if not self.sizes.numel():
            return None, None
        sent, arriving = self.sizes.tolist()
        return sent, arriving


class Arriving(NamedTuple):
    """Rows that come to a rank.

    Attributes:
        rows: how many.
        counts: of each of its experts, [experts].
        on_host: the same on the CPU.
    """

    rows: int
    counts: torch.Tensor
    on_host: torch.Tensor


def exchanged_rows(
    redistributor: Redistributor, index: torch.Tensor, all_experts: int, layout: Layout, axis: int
) -> tuple[Rows, Exchange, Arriving]:
    """Return this rank's rows by rank and expert, the exchange, and what comes to its own experts.

    Args:
        index: this rank's tokens' experts, [tokens, chosen].
        layout: of the experts' matrices, split by expert on ``axis`` and perhaps on others.
        axis: of the mesh, on which tokens and experts are both split.
    """
    group, ranks = redistributor.device_mesh.get_group(axis), redistributor.axis_size(axis)
    firsts, experts = _experts_by_rank(redistributor, all_experts, layout, axis)
    if index.is_meta:
        rows = Rows(index.new_empty(_even_rows(index, experts, all_experts, ranks)), index.new_empty(0), index.shape[1])
    else:
        slots = torch.full((all_experts,), ranks * experts, device=index.device)
        for rank, first in enumerate(firsts):
            slots[first : first + experts] = torch.arange(rank * experts, (rank + 1) * experts, device=index.device)
        rows = Rows.of(slots[index], 0, ranks * experts, all_experts)
    sent = index.new_empty(ranks * experts) if index.is_meta else rows.counts
    arriving = torch_internals.all_to_all(sent, group).view(ranks, experts)
    if index.is_meta:
        counts = arriving.sum(0)
        exchange = Exchange(group, torch.empty(0), torch.empty_like(rows.choice))
        return rows, exchange, Arriving(rows.choice.shape[0], counts, counts)
    # All that the host has to know, in one message.
    known = torch.cat([sent.view(ranks, experts).sum(1), arriving.sum(1), arriving.sum(0)]).cpu()
    sizes, on_host = known[: 2 * ranks].view(2, ranks), known[2 * ranks :]
    of_expert = torch.arange(experts, device=index.device).repeat(ranks).repeat_interleave(arriving.flatten())
    exchange = Exchange(group, sizes, of_expert.argsort(stable=True))
    return rows, exchange, Arriving(int(sizes[1].sum()), arriving.sum(0), on_host)


def _experts_by_rank(
    redistributor: Redistributor, all_experts: int, layout: Layout, axis: int
) -> tuple[Sequence[int], int]:
    """Return the first expert of each rank along ``axis``, and how many each has."""
    first, experts = split_offset(redistributor, all_experts, layout, 0)
    inner = [a for a, place in enumerate(layout) if a > axis and place == Shard(0)]
    span = experts
    for other in inner:
        span *= redistributor.axis_size(other)
    start = first - redistributor.coordinate(axis) * span
    return [start + rank * span for rank in range(redistributor.axis_size(axis))], experts


def _even_rows(index: torch.Tensor, experts: int, all_experts: int, ranks: int) -> int:
    return ranks * -(-index.numel() * experts // all_experts)
