"""GEMMs of experts' rows with their weights: torch's grouped kernel, or one GEMM for each expert.

The grouped kernel supports bfloat16 on a GPU, and is slow on some GPUs (``runs_one_by_one``). One GEMM per expert needs
the number of rows of each expert on the host, which waits for the GPU once a forward; where tokens come from other
ranks the host knows the numbers already.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F

from cost_model.kernels.gemm import runs_one_by_one


@torch.library.custom_op("shardplan::gemm_per_expert", mutates_args=())
def gemm_per_expert(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return each row times the transpose of its expert's weight, [rows, n].

    All GEMMs together are one op, so that selective checkpointing can save the result.

    Args:
        rows: [rows, k], sorted by expert.
        weights: [experts, n, k].
        counts: [experts], number of rows of each expert; on the CPU.
    """
    result, sizes = rows.new_empty(rows.shape[0], weights.shape[1]), counts.tolist()
    for own_rows, weight, out in zip(rows.split(sizes), weights, result.split(sizes), strict=True):
        torch.mm(own_rows, weight.t(), out=out)
    return result


GEMM_PER_EXPERT_OP = torch.ops.shardplan.gemm_per_expert.default
"""``gemm_per_expert`` as it is dispatched."""


class GroupedGemm(NamedTuple):
    """The GEMMs of one call of the experts.

    Attributes:
        counts: [experts], number of rows of each expert; on the CPU if ``per_expert``.
        per_expert: whether each expert has a GEMM of its own, in place of one grouped kernel.
    """

    counts: torch.Tensor
    per_expert: bool

    @classmethod
    def choose(
        cls, counts: torch.Tensor, counts_on_host: torch.Tensor | None, rows: int, weights: torch.Tensor
    ) -> Self:
        """Return the faster of the two ways: the grouped kernel, or one GEMM per expert.

        Args:
            counts: [experts], number of rows of each expert.
            counts_on_host: ``counts`` on the CPU; None: not known there yet.
            rows: number of rows of all experts together.
            weights: [experts, n, k], the weights of one of the GEMMs.
        """
        if not _is_faster_per_expert(rows, weights):
            return cls(counts, per_expert=False)
        if counts_on_host is None:
            counts_on_host = counts if counts.is_meta else counts.cpu()
        return cls(counts_on_host, per_expert=True)

    def forward(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return each row times the transpose of its expert's weight: [rows, k], [experts, n, k] -> [rows, n]."""
        if rows.is_meta:
            return rows.new_empty(rows.shape[0], weights.shape[1])
        if self.per_expert:
            result: torch.Tensor = gemm_per_expert(rows, weights, self.counts)
            return result
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=self._ends())

    def weight_gradient(self, gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``weights``: [rows, n], [rows, k] -> [experts, n, k]."""
        if gradient.is_meta:
            return torch.empty_like(weights)
        if not self.per_expert:
            return F.grouped_mm(gradient.t(), rows, offs=self._ends())
        result, sizes = torch.empty_like(weights), self.counts.tolist()
        for own_gradient, own_rows, out in zip(gradient.split(sizes), rows.split(sizes), result, strict=True):
            torch.mm(own_gradient.t(), own_rows, out=out)
        return result

    def by_row(self, biases: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the bias of each row's expert: [experts, n] -> [rows, n], as many as in ``rows``."""
        return biases[self._experts(rows)]

    def sum_by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of each expert's rows: [rows, n] -> [experts, n]."""
        return rows.new_zeros(self.counts.shape[0], rows.shape[1]).index_add_(0, self._experts(rows), rows)

    def _experts(self, rows: torch.Tensor) -> torch.Tensor:
        counts = self.counts.to(rows.device)
        experts = torch.arange(counts.shape[0], device=rows.device)
        return experts.repeat_interleave(counts, output_size=rows.shape[0])

    def _ends(self) -> torch.Tensor:
        return self.counts.cumsum(0, dtype=torch.int32)


def _is_faster_per_expert(rows: int, weights: torch.Tensor) -> bool:
    if not weights.is_cuda or weights.dtype != torch.bfloat16:
        return True
    major, minor = torch.cuda.get_device_capability(weights.device)
    experts, n, k = weights.shape
    return runs_one_by_one(
        tokens=rows,
        n=min(n, k),
        groups=experts,
        architecture=f"sm{major}{minor}",
        processors=torch.cuda.get_device_properties(weights.device).multi_processor_count,
    )
