"""Routing of tokens to experts: rows sorted by expert, and their all-to-all where other ranks hold the experts.

A *row* is a pair of a token and one of its chosen experts. On meta the choices are unknown, so every expert is assumed
to have the same number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Shard

from cost_model.layouts.layout import Layout
from executor.ops.lookups.embedding import split_offset
from executor.redistribute import Redistributor
from executor.torch_internals import dtensor as torch_internals


class RoutedRows(NamedTuple):
    """The rows of this rank's tokens, sorted by expert.

    Attributes:
        choice: [rows], index of each row into the flattened [tokens, chosen] choices.
        counts: [experts], number of rows of each expert.
        chosen: number of experts that each token chooses.
    """

    choice: torch.Tensor
    counts: torch.Tensor
    chosen: int

    @property
    def token(self) -> torch.Tensor:
        """[rows], the token of each row."""
        return self.choice // self.chosen

    @classmethod
    def from_choices(cls, index: torch.Tensor, first: int, experts: int, all_experts: int) -> RoutedRows:
        """Return the rows of the experts ``first`` to ``first + experts - 1``.

        Args:
            index: the experts chosen for each token, [tokens, chosen].
            first: index of the first of these experts.
            experts: number of these experts.
            all_experts: number of all experts.
        """
        choices = index.reshape(-1) - first
        if choices.is_meta:
            rows = -(-choices.numel() * experts // all_experts)
            choice, counts = choices.new_empty(rows), choices.new_empty(experts)
        else:
            elsewhere = (choices < 0) | (choices >= experts)
            choices = choices.masked_fill(elsewhere, experts)
            counts = torch.bincount(choices, minlength=experts + 1)[:experts]
            order = choices.argsort(stable=True)
            # With all experts on this rank the number of rows is known, and the host does not wait for the GPU.
            choice = order if experts == all_experts else order[: int(counts.sum())]
        return cls(choice=choice, counts=counts, chosen=index.shape[1])


class TokenExchange(NamedTuple):
    """The all-to-alls of rows between the ranks of their tokens and the ranks of their experts.

    Attributes:
        group: process group of the axis that shards tokens and experts.
        sizes: [2, ranks], on the CPU: number of rows sent to each rank, and number received from each rank. Empty on
            meta, where all of these are equal.
        order: [rows], indices that sort the received rows by expert.
    """

    group: Any
    sizes: torch.Tensor
    order: torch.Tensor

    def to_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Send ``rows`` [rows, ...] to the ranks of their experts; return the received rows, sorted by expert."""
        sent, received = self._sizes()
        return torch_internals.all_to_all(rows, self.group, received, sent)[self.order]

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Send ``rows``, as ``to_experts`` returns them, back to the ranks of their tokens; return this rank's rows."""
        sent, received = self._sizes()
        by_rank = torch.empty_like(rows)
        by_rank[self.order] = rows
        return torch_internals.all_to_all(by_rank, self.group, sent, received)

    def _sizes(self) -> tuple[list[int] | None, list[int] | None]:
        if not self.sizes.numel():
            return None, None
        sent, received = self.sizes.tolist()
        return sent, received


class ReceivedRows(NamedTuple):
    """The rows that this rank receives.

    Attributes:
        rows: number of rows.
        counts: [experts], number of rows of each of this rank's experts.
        counts_on_host: ``counts`` on the CPU.
    """

    rows: int
    counts: torch.Tensor
    counts_on_host: torch.Tensor


def exchange_rows(
    redistributor: Redistributor, index: torch.Tensor, all_experts: int, layout: Layout, axis: int
) -> tuple[RoutedRows, TokenExchange, ReceivedRows]:
    """Return this rank's rows sorted by rank and expert, their exchange, and the rows that this rank receives.

    Args:
        redistributor: redistributes on the mesh.
        index: the experts chosen for each of this rank's tokens, [tokens, chosen].
        all_experts: number of all experts.
        layout: layout of the experts' weights; it shards experts on ``axis`` and perhaps on other axes.
        axis: the mesh axis that shards tokens and experts.
    """
    group, ranks = redistributor.device_mesh.get_group(axis), redistributor.axis_size(axis)
    firsts, experts = _experts_by_rank(redistributor, all_experts, layout, axis)
    if index.is_meta:
        choice = index.new_empty(_balanced_rows(index, experts, all_experts, ranks))
        rows = RoutedRows(choice, index.new_empty(0), index.shape[1])
        sent = index.new_empty(ranks * experts)
    else:
        slots = torch.full((all_experts,), ranks * experts, device=index.device)
        for rank, first in enumerate(firsts):
            slots[first : first + experts] = torch.arange(rank * experts, (rank + 1) * experts, device=index.device)
        rows = RoutedRows.from_choices(slots[index], 0, ranks * experts, all_experts)
        sent = rows.counts
    received = torch_internals.all_to_all(sent, group).view(ranks, experts)
    if index.is_meta:
        counts = received.sum(0)
        exchange = TokenExchange(group, torch.empty(0), torch.empty_like(rows.choice))
        return rows, exchange, ReceivedRows(rows.choice.shape[0], counts, counts)
    # One copy to the host for all the numbers that the host needs.
    on_host = torch.cat([sent.view(ranks, experts).sum(1), received.sum(1), received.sum(0)]).cpu()
    sizes, counts_on_host = on_host[: 2 * ranks].view(2, ranks), on_host[2 * ranks :]
    expert_of_row = torch.arange(experts, device=index.device).repeat(ranks).repeat_interleave(received.flatten())
    exchange = TokenExchange(group, sizes, expert_of_row.argsort(stable=True))
    return rows, exchange, ReceivedRows(int(sizes[1].sum()), received.sum(0), counts_on_host)


def _experts_by_rank(
    redistributor: Redistributor, all_experts: int, layout: Layout, axis: int
) -> tuple[Sequence[int], int]:
    """Return the index of the first expert of each rank along ``axis``, and the number of experts of each rank."""
    first, experts = split_offset(redistributor, all_experts, layout, 0)
    inner_axes = [other for other, place in enumerate(layout) if other > axis and place == Shard(0)]
    span = experts
    for other in inner_axes:
        span *= redistributor.axis_size(other)
    start = first - redistributor.coordinate(axis) * span
    return [start + rank * span for rank in range(redistributor.axis_size(axis))], experts


def _balanced_rows(index: torch.Tensor, experts: int, all_experts: int, ranks: int) -> int:
    """Return the number of this rank's rows if every expert has the same number of rows."""
    return ranks * -(-index.numel() * experts // all_experts)
