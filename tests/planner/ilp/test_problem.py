"""The program of real models against brute force, and the two formulas on hand-worked totals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import families
from torch import nn

from planner.formulation.decision import decision_from_assignment
from planner.formulation.estimate import itemise
from planner.formulation.formulate import Formulation, Formulator
from planner.ilp.problem import InfeasibleAssignmentError, totals
from planner.ilp.random_assignment import random_assignment
from planner.ilp.solve import least_memory, solve
from planner.ilp.step_cost import peak_bytes, step_time_s
from planner.liveness.structure import Structure
from planner.session import MeshSpec, PlanningSession


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.down(self.relu(self.up(x))), labels)


class Attention(nn.Module):
    """One block with three uses of one tensor, so that redistributions are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (4, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.o(mixed).flatten(0, 1), labels.flatten())


def example(name: str) -> tuple[nn.Module, dict[str, Any]]:
    if name == "mlp":
        return TwoLinears(), {"x": torch.zeros(8, 32), "labels": torch.zeros(8, dtype=torch.long)}
    return Attention(), {"x": torch.zeros(4, 8, 16), "labels": torch.zeros(4, 8, dtype=torch.long)}


def restricted(
    name: str, mesh: str, micro_batches: int, seed: int, most: int
) -> tuple[Formulator, Structure, Formulation]:
    """Return the real problem with at most ``most`` choices a node, the first always among them."""
    module, inputs = example(name)
    session = PlanningSession(
        module, cluster="4xtoy", example_inputs=inputs, dtype="fp32", micro_batches=micro_batches, ac="none"
    )
    search = session._planner
    formulator, layer = search.formulator(search.run_of(MeshSpec.parse(mesh), micro_batches, "none"))
    full = formulator.build()
    assert full is not None
    generator = random.Random(seed)

    def some(choices: tuple[Any, ...]) -> tuple[Any, ...]:
        return choices if len(choices) <= most else (choices[0], *generator.sample(choices[1:], most - 1))

    few = formulator.with_choices([some(s) for s in full.strategies], [some(s) for s in full.stored])
    return formulator, layer, few


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=1,tp=4"])
@pytest.mark.parametrize(("name", "micro_batches", "most"), [("mlp", 1, 4), ("mlp", 2, 4), ("attention", 1, 2)])
def test_real_problems_equal_brute_force(name: str, mesh: str, micro_batches: int, most: int) -> None:
    for seed in range(2):
        formulator, layer, few = restricted(name, mesh, micro_batches, seed, most)
        tried = every_time_and_peak(few)
        solution = solve(few.problem, mip_gap=0)
        assert solution is not None
        assert solution.objective_s == pytest.approx(min(time_s for time_s, _ in tried.values()), rel=1e-7)
        least = least_memory(few.problem)
        assert least is not None
        exact = min(peak for _, peak in tried.values())
        assert least.nbytes == pytest.approx(exact, rel=1e-4)
        fastest = peak_bytes(totals(few.problem, solution.assignment))
        for cap in (exact, (exact + fastest) / 2, fastest - 1, exact - 1):
            times = [time_s for time_s, peak in tried.values() if peak <= cap]
            found = solve(few.problem, memory_bytes=cap, mip_gap=0)
            assert (found is None) == (not times)
            if found is not None:
                assert found.objective_s == pytest.approx(min(times), rel=1e-7)
                assert peak_bytes(totals(few.problem, found.assignment)) <= cap
        sample = random.Random(seed).sample(sorted(tried), min(30, len(tried)))
        for assignment in (solution.assignment, least.assignment, *sample):
            same_price(formulator, layer, few, assignment)


def same_price(
    formulator: Formulator, structure: Structure, formulation: Formulation, assignment: Sequence[int]
) -> None:
    """Check that program and estimator come to the same totals, quantity by quantity."""
    total = totals(formulation.problem, assignment)
    price = itemise(formulator, structure, decision_from_assignment(formulation, assignment)).charge
    for name in {*total, *price}:
        assert price.get(name, 0.0) == pytest.approx(total.get(name, 0.0), rel=1e-9), name


@pytest.mark.parametrize(
    ("family", "micro_batches", "ac"), [("gpt2", 2, "full"), ("t5", 1, "selective"), ("llama", 4, "full")]
)
def test_whole_models_cost_alike_in_program_and_estimator(family: str, micro_batches: int, ac: str) -> None:
    module, inputs = families.make(family, 8)
    session = PlanningSession(
        module, cluster="4xtoy", example_inputs=inputs, dtype="fp32", micro_batches=micro_batches, ac=ac
    )
    search = session._planner
    formulator, layer, full = search.formulate(search.run_of(MeshSpec.parse("dp=1,tp=4"), micro_batches, ac), None)
    assert full is not None
    assert layer.recomputed_redistributions
    for seed in range(4):
        assignment = random_assignment(full.problem, seed, lambda node, choice: True)
        assert assignment is not None
        same_price(formulator, layer, full, assignment)


def every_time_and_peak(few: Formulation) -> dict[tuple[int, ...], tuple[float, float]]:
    """Return (seconds, bytes) of every feasible assignment."""
    found = {}
    for assignment in itertools.product(*(range(len(node.charges)) for node in few.problem.nodes)):
        try:
            total = totals(few.problem, assignment)
        except InfeasibleAssignmentError:
            continue
        found[assignment] = step_time_s(total), peak_bytes(total)
    return found
