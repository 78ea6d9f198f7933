"""Products of experts' rows with their matrices: torch's one kernel for all, or a product for each.

The one kernel takes bfloat16 on a GPU, and is slow on some (`runs_one_by_one`). For a product of its
own, how many rows an expert has must be known to the host, which waits for the GPU then, once a forward; where tokens
come from other ranks it has waited for that already.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F

from cost_model.kernels.gemm import runs_one_by_one


@torch.library.custom_op("shardplan::products_one_by_one", mutates_args=())
def products_one_by_one(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return each row times the transpose of its expert's matrix, as one op, which checkpointing can keep.

    Args:
        rows: [rows, k], those of one expert after those of another.
        matrices: [experts, n, k].
        counts: [experts], rows of each; on the CPU.
    """
    found, sizes = rows.new_empty(rows.shape[0], matrices.shape[1]), counts.tolist()
    for piece, matrix, result in zip(rows.split(sizes), matrices, found.split(sizes), strict=True):
        torch.mm(piece, matrix.t(), out=result)
    return found


PRODUCTS_OP = torch.ops.shardplan.products_one_by_one.default
"""As it is dispatched."""


class ExpertProducts(NamedTuple):
    """How many rows each expert has, and how their products run.

    Attributes:
        counts: [experts]; on the CPU where products run one by one.
    """

    counts: torch.Tensor
    one_by_one: bool

    @classmethod
    def of(cls, counts: torch.Tensor, on_host: torch.Tensor | None, rows: int, down: torch.Tensor) -> Self:
        """Choose what is faster for so many ``rows`` and matrices like ``down`` [experts, width, inner].

        Args:
            counts: [experts], rows of each.
            on_host: the same on the CPU, where it is there already.
        """
        if not _one_by_one(rows, down):
            return cls(counts, one_by_one=False)
        return cls(counts if counts.is_meta else counts.cpu() if on_host is None else on_host, one_by_one=True)

    def of_rows(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Return each row times the transpose of its expert's matrix: [rows, k], [experts, n, k] -> [rows, n]."""
        if rows.is_meta:
            return rows.new_empty(rows.shape[0], matrices.shape[1])
        if self.one_by_one:
            found: torch.Tensor = products_one_by_one(rows, matrices, self.counts)
            return found
        return F.grouped_mm(rows, matrices.transpose(1, 2), offs=self._ends())

    def of_matrices(self, left: torch.Tensor, right: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return each expert's sum over its rows of outer products: [rows, n], [rows, k] -> [experts, n, k]."""
        if left.is_meta:
            return torch.empty_like(like)
        if not self.one_by_one:
            return F.grouped_mm(left.t(), right, offs=self._ends())
        found, sizes = torch.empty_like(like), self.counts.tolist()
        for a, b, result in zip(left.split(sizes), right.split(sizes), found, strict=True):
            torch.mm(a.t(), b, out=result)
        return found

    def _ends(self) -> torch.Tensor:
        return self.counts.cumsum(0, dtype=torch.int32)


def _one_by_one(rows: int, down: torch.Tensor) -> bool:
    if not down.is_cuda or down.dtype != torch.bfloat16:
        return True
    major, minor = torch.cuda.get_device_capability(down.device)
    experts, width, inner = down.shape
    return runs_one_by_one(
        tokens=rows,
        n=min(width, inner),
        groups=experts,
        architecture=f"sm{major}{minor}",
        processors=torch.cuda.get_device_properties(down.device).multi_processor_count,
    )
