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


OF_THE_BATCH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "overlap of classes": lambda x, y: 1 - (2 * (x * y).sum(0) / (x.square().sum(0) + y.square().sum(0) + 1)).mean(),
    "distance of means": lambda x, y: (x.mean(0) - y.mean(0)).square().sum(),
    "from the center": lambda x, y: (x - x.mean(0, keepdim=True) - y).square().mean(),
    "balanced classes": lambda x, y: (x.softmax(-1).mean(dim=0) * (y > 0).to(x.dtype).mean(dim=0)).sum(),
}
"""Losses of a statistic of the whole batch, 16 numbers for each of three at most."""


class Fitted(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.loss = nn.Linear(16, 16), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.body(x), y)


@pytest.mark.parametrize("name", [*LOSSES, *OF_THE_BATCH])
def test_data_parallelism_moves_few_numbers_in_the_forward(name: str) -> None:
    inputs = torch.randn(8, 16), torch.randn(8, 16)
    options = {"cluster": "1x4xtoy", "mesh": "dp=4", "dtype": "fp32", "micro_batches": 1}
    loss = {**LOSSES, **OF_THE_BATCH}[name]
    plan = build_plan(Fitted(loss), example_inputs=inputs, planner="ddp", **options)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert {port.layout for port in plan.input_plan["input"].values()} == {(Shard(0),)}
    forward = [each for each in plan.estimate.collectives if each.phase == "forward"]
    assert forward
    most = 16 * 4 if name in OF_THE_BATCH else 8
    assert all(each.kind == "all_reduce" and each.bytes <= most for each in forward)
