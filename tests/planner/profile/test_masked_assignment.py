"""Assignments to masked elements, whose number is a matter of values."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from planner import build_plan


class SpecialToken(nn.Module):
    """Gives one token an embedding of its own."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 4)
        self.special = nn.Parameter(torch.zeros(16)) if trained else 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden[tokens == 3] = self.special
        return self.head(hidden).square().mean()


def test_a_number_is_assigned() -> None:
    plan = build_plan(
        SpecialToken(trained=False), cluster="1x2xtoy", example_inputs=(torch.zeros(8, 4, dtype=torch.long),)
    )
    assert plan.verification.outcome == "as-planned"


def test_a_trained_value_is_assigned_in_an_opaque_module() -> None:
    # DTensor does not run the backward of the assignment, not even on whole tensors.
    model = nn.Sequential(OrderedDict(tokens=SpecialToken(trained=True)))
    plan = build_plan(model, cluster="1x2xtoy", example_inputs=(torch.zeros(8, 4, dtype=torch.long),))
    assert dict(plan.opaque_modules) == {"tokens": "0=0;mean"}
    assert plan.verification.outcome == "as-planned"
