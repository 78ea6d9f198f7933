"""Losses that are averaged over the batch: data parallelism splits it, and reduces one number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from planner import build_plan

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared error": F.mse_loss,
    "mean": lambda x, y: (x - y).square().sum(-1).mean(),
    "binary": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "divergence": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "smoothed": lambda x, y: F.cross_entropy(x, y.argmax(-1), label_smoothing=0.1),
    "soft labels": lambda x, y: F.cross_entropy(x, y.softmax(-1)),
    "likelihood": lambda x, y: F.nll_loss(x.log_softmax(-1), y.argmax(-1)),
    "masked": lambda x, y: ((x - y).square() * (y > 0)).sum() / (y > 0).sum(),
    "two": lambda x, y: F.l1_loss(x, y) + 0.1 * x.abs().mean(),
}


class Fitted(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.loss = nn.Linear(16, 16), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.body(x), y)


@pytest.mark.parametrize("name", LOSSES)
def test_data_parallelism_moves_one_number_in_the_forward(name: str) -> None:
    inputs = torch.randn(8, 16), torch.randn(8, 16)
    options = {"cluster": "1x4xtoy", "mesh": "dp=4", "dtype": "fp32", "micro_batches": 1}
    plan = build_plan(Fitted(LOSSES[name]), example_inputs=inputs, planner="ddp", **options)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert {port.layout for port in plan.input_plan["input"].values()} == {(Shard(0),)}
    forward = [each for each in plan.estimate.collectives if each.phase == "forward"]
    assert forward
    assert all(each.kind == "all_reduce" and each.bytes <= 8 for each in forward)
