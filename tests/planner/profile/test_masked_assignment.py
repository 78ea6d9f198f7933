"""Assignments to masked elements, whose number is a matter of values."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from planner import build_plan
from planner.errors import UnsupportedOpError
from planner.regions.regions import RegionGraph
from planner.run.unsupported_ops import unsupported_ops
from planner.strategies.enumerate import StrategyTable


class SpecialToken(nn.Module):
    """Gives one token an embedding of its own: the same each time, or one of as many rows as the token occurs."""

    def __init__(self, *, trained: bool, rows: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 4)
        self.special = nn.Parameter(torch.zeros(16)) if trained else 0.0
        self.rows = rows

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden[tokens == 3] = self.special.unsqueeze(0) if self.rows else self.special
        return self.head(hidden).square().mean()


@pytest.mark.parametrize("trained", [False, True])
def test_a_number_or_a_trained_value_is_assigned_by_a_mask(trained: bool) -> None:
    model = SpecialToken(trained=trained)
    plan = build_plan(model, cluster="1x2xtoy", example_inputs=(torch.zeros(8, 4, dtype=torch.long),))
    assert not plan.opaque_modules
    assert plan.verification.outcome == "as-planned"


def test_rows_are_assigned_in_an_opaque_module() -> None:
    # DTensor does not run the backward of the assignment, not even on whole tensors.
    model = nn.Sequential(OrderedDict(tokens=SpecialToken(trained=True, rows=True)))
    plan = build_plan(model, cluster="1x2xtoy", example_inputs=(torch.zeros(8, 4, dtype=torch.long),))
    assert dict(plan.opaque_modules) == {"tokens": "0=0;mean"}
    assert plan.verification.outcome == "as-planned"


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (SpecialToken(trained=True, rows=True) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.source(tokens) + self.target(tokens)


def test_a_module_that_is_found_when_another_is_opaque_is_opaque_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in T5Gemma 2, where the encoder's table is found first, and the decoder's behind it."""

    def first(regions: RegionGraph, table: StrategyTable) -> UnsupportedOpError | None:
        found = unsupported_ops(regions, table)
        return None if found is None else UnsupportedOpError(found.ops[:1])

    monkeypatch.setattr("planner.traced_job.unsupported_ops", first)
    plan = build_plan(TwoTables(), cluster="1x2xtoy", example_inputs=(torch.zeros(8, 4, dtype=torch.long),))
    assert sorted(plan.opaque_modules) == ["source", "target"]
    assert plan.verification.outcome == "as-planned"
