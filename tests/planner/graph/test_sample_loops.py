"""Forwards that loop over their samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from planner import build_plan
from planner.graph.trace_module import trace_module

LOOPS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "iteration": lambda layer, x: torch.stack([layer(row).sum(0) for row in x]),
    "index": lambda layer, x: torch.stack([layer(x[row]).sum(0) for row in range(len(x))]),
    "split": lambda layer, x: torch.cat([layer(part) for part in x.split(1)]),
    "unbind": lambda layer, x: torch.stack(layer(x).unbind(0)),
    "sizes": lambda layer, x: torch.cat(torch.split(layer(x), [1] * len(x))),
    # Frames that are viewed as clips of four, as video encoders do.
    "groups": lambda layer, x: layer(x).reshape(len(x) // 4, 4, 4, 16).mean(1),
}


class Loop(nn.Module):
    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layer, x).square().mean()


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_samples_is_traced_at_the_batch(name: str) -> None:
    traced = trace_module(Loop(LOOPS[name]), example_inputs=(torch.randn(8, 4, 16),))
    assert not traced.any_batch
    assert traced.traced_batch == 8


def test_a_forward_that_takes_some_samples_serves_any_batch() -> None:
    traced = trace_module(Loop(lambda layer, x: layer(x) - x[0] + x[:, 1:2]), example_inputs=(torch.randn(8, 4, 16),))
    assert traced.any_batch


def test_a_plan_of_groups_is_verified() -> None:
    plan = build_plan(
        Loop(LOOPS["groups"]), cluster="1x4xtoy", mesh="dp=2,tp=2", example_inputs=(torch.randn(8, 4, 16),)
    )
    assert plan.verification.outcome == "as-planned"


def test_its_plan_is_verified_and_says_how_many_micro_batches_were_planned() -> None:
    plan = build_plan(Loop(LOOPS["split"]), cluster="1x2xtoy", example_inputs=(torch.randn(8, 4, 16),))
    assert plan.verification.outcome == "as-planned"
    assert plan.micro_batches == 1
    assert any("takes its batch apart" in note for note in plan.notes)
    given = build_plan(
        Loop(LOOPS["split"]), cluster="1x2xtoy", example_inputs=(torch.randn(8, 4, 16),), micro_batches=2
    )
    assert given.micro_batches == 2
    assert not any("takes its batch apart" in note for note in given.notes)
