"""The mode that runs own and local ops leaves other functions of torch as they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from executor.ops.dispatch import OwnOps


def test_functions_that_dispatch_again_in_their_body_end_beside_local_ops() -> None:
    rows, columns = torch.arange(2.0), torch.arange(3.0)
    with OwnOps(None, local_ops=("glu",)):  # type: ignore[arg-type]
        grid = torch.meshgrid(rows, columns, indexing="ij")
        again = torch.meshgrid(columns, rows, indexing="xy")
        halves = F.glu(torch.ones(4))
    assert [tuple(part.shape) for part in (*grid, *again)] == [(2, 3)] * 4
    assert halves.shape == (2,)
