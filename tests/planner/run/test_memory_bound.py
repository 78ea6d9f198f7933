"""What is counted from the structure alone is less than any plan needs, and close enough to spare work."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import families
from torch import nn

from cost_model.layouts.layout import MeshSpec
from planner.ilp.relaxation import least_memory_bound
from planner.session import PlanningSession


@pytest.mark.parametrize(
    ("family", "optimizer", "dtype", "share"),
    [
        ("mlp", "adamw", "fp32", 0.87),
        ("gpt2", "sgd", "bf16", 0.68),
        ("llama", "adamw", "bf16", 0.79),
        pytest.param("t5", "adamw", "fp32", 0.84, marks=pytest.mark.slow),
        ("mixtral", "sgd", "bf16", 0.6),
    ],
)
def test_no_plan_goes_below(family: str, optimizer: str, dtype: str, share: float) -> None:
    module, inputs = families.make(family, 8)
    options: dict[str, Any] = {"optimizer": optimizer, "dtype": dtype, "cluster": "1x4xtoy"}
    search = PlanningSession(module, example_inputs=inputs, **options)._planner
    modes = ("none", "selective", "full") if search.model.blocks.lists else ("none",)
    shares = []
    for mesh, count, ac in itertools.product(("dp=4", "dp=2,tp=2"), (1, 2, 8), modes):
        run = search.run_of(MeshSpec.parse(mesh), count, ac)
        formulation = search.formulate(run, None)[2]
        assert formulation is not None
        least = least_memory_bound(formulation.problem)
        assert least is not None
        shares.append(search.least_memory_bytes(run) / least)
    assert max(shares) <= 1 + 1e-9
    assert min(shares) > share


class Unused(nn.Module):
    """Most of its parameters are used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.last = nn.Linear(64, 16)
        self.unused = nn.Linear(2048, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()).square().mean()


def test_parameters_that_nobody_uses_count_for_nothing() -> None:
    with torch.device("meta"):
        module, x = Unused(), torch.zeros(8, 64)
    planned = PlanningSession(module, example_inputs={"x": x}, cluster="1x4xtoy", dtype="fp32")
    free = planned.plan()
    assert free.estimate is not None
    peak = free.estimate.peak_memory_bytes
    assert peak < 2048 * 2048
    within = planned.plan(memory_bytes=peak)
    assert within.estimate is not None
    assert within.estimate.step_time_s <= free.estimate.step_time_s * 1.002
    least_bytes = planned.least_memory_bytes()
    assert least_bytes is not None
    assert least_bytes <= peak
    assert planned.plan_if_any(memory_bytes=least_bytes) is not None
    assert planned.plan_if_any(memory_bytes=least_bytes - 1) is None
