"""Branches on whether numbers are finite: which they are, and that each rank takes them by its own part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner import build_plan
from planner.model_rewrites.replaced_calls.finite_branches import numbers_are_finite


def unless_finite(x: Tensor) -> int:
    if not torch.isfinite(x).all():
        return 1
    return 0


def of_two(x: Tensor) -> int:
    return 1 if x.dtype == torch.float32 and (x.isnan().any() or torch.isinf(x).any()) else 0


def by_function(x: Tensor) -> int:
    if torch.any(torch.isnan(x)):
        return 1
    return 0


def of_a_loss(x: Tensor) -> int:
    return 1 if torch.isnan(x.sum()) else 0


@pytest.mark.parametrize("branch", [unless_finite, of_two, by_function, of_a_loss], ids=lambda branch: branch.__name__)
def test_numbers_are_taken_to_be_finite(branch: Callable[[Tensor], int]) -> None:
    wrong = torch.tensor([1.0, float("nan")])
    assert branch(wrong) == 1
    with numbers_are_finite():
        assert branch(torch.empty(2, device="meta")) == 0
        assert branch(wrong) == 0
    assert branch(wrong) == 1


def test_other_readers_get_a_tensor() -> None:
    with numbers_are_finite():
        wrong = torch.tensor([1.0, float("inf")])
        kept = torch.where(torch.isfinite(wrong), wrong, 0.0)
        clamped = torch.where(torch.isinf(wrong).any(), 2.0, 3.0)
        count = int(torch.isinf(wrong).sum())
    assert kept.tolist() == [1.0, 0.0]
    assert clamped.item() == 2.0
    assert count == 1


def test_a_check_that_raises_is_none() -> None:
    def check(x: Tensor) -> None:
        if torch.isnan(x).any():
            raise ValueError("not a number")

    with numbers_are_finite(), pytest.raises(ValueError, match="not a number"):
        check(torch.tensor([float("nan")]))


class Guarded(nn.Module):
    """Clamps what is not finite, as DETR does in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if torch.isinf(x).any() or torch.isnan(x).any():
                limit = torch.finfo(x.dtype).max - 1000
                x = torch.clamp(x, min=-limit, max=limit)
        return x.square().mean()


def test_a_model_that_clamps_is_planned_op_by_op() -> None:
    plan = build_plan(
        Guarded(), example_inputs=(torch.randn(8, 4, 16),), cluster="1x4xtoy", mesh="dp=2,tp=2", dtype="fp32"
    )
    assert not plan.opaque_modules
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
