"""Modules that are called more than once: one key of a plan for all calls, in pricing, reading and running."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from executor.verify import verify
from planner.session import PlanningSession
from planner.writing.reprice import estimate_plan

MESH = "dp=2,tp=2"
SEEDS = 3


class Shared(nn.Module):
    """Three linear layers, and one module without parameters that is called several times."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.shared = shared


class Unlike(Shared):
    """Each call's result goes to another region; the second call returns no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.shared(self.a(x)) + 1
        h = self.shared(x * 3) * h
        h = self.shared(self.b(h)) / 3
        return self.c(h).square().mean()


class Passing(Shared):
    """The second call's result goes to a module at whose input it can be redistributed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.shared(self.a(x)) * 2
        return self.c(self.shared(self.b(h))).square().mean()


@pytest.mark.parametrize(("kind", "shared"), [(Unlike, nn.GELU), (Passing, nn.GELU), (Passing, nn.Identity)])
def test_plans_are_repriced_and_run_as_planned(kind: type[Shared], shared: type[nn.Module]) -> None:
    module, inputs = kind(shared()), (torch.randn(8, 4, 16),)
    session = PlanningSession(
        module, cluster="1x4xtoy", example_inputs=inputs, dtype="fp32", micro_batches=1, ac="none"
    )
    ports = 0
    for planner in ("ilp", *(f"random:{seed}" for seed in range(SEEDS))):
        plan = session.plan(planner=planner, mesh=MESH)
        assert plan.estimate is not None
        assert estimate_plan(module, plan, example_inputs=inputs).estimate == plan.estimate
        assert verify(module, plan, inputs).equal
        ports += "shared" in " ".join((*plan.input_plan, *plan.output_plan))
    assert ports, "no plan redistributes an argument or result of the module"
