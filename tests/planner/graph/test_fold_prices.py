"""Folded or not: every decision costs the same, and so does the best; and what is written costs what was solved for."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from folded import compare as folding
from folded.tied import TiedProblem
from hypothesis import given, settings
from support.architectures import ARCHITECTURES, SEQ
from support.random_problems import problems
from torch import nn

from planner.formulation.estimate import itemise
from planner.ilp.problem import InfeasibleAssignmentError, Problem, Solution, totals
from planner.ilp.step_cost import peak_bytes, step_time_s
from planner.session import PlanningSession

BATCH = 8
SAME = 1e-9
SLOW = pytest.mark.slow


def both_forms(name: str, ac: str, micro_batches: int) -> tuple[PlanningSession, folding.BothForms]:
    module = ARCHITECTURES[name].build()
    session = PlanningSession(
        module, cluster="1x4xtoy", batch=BATCH, seq=SEQ, micro_batches=micro_batches, ac=ac, dtype="fp32"
    )
    return session, folding.both_forms(module, "dp=2,tp=2", session)


def by_kind(price: Any) -> Counter[tuple[Any, ...]]:
    """Return how often each collective runs."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in price.collectives:
        found[row.kind, row.axis, row.phase, row.nbytes] += row.count
    return found


def check_prices(name: str, ac: str, micro_batches: int, seeds: int) -> None:
    session, both = both_forms(name, ac, micro_batches)
    check_decisions(session, both, seeds)


def check_decisions(session: PlanningSession, both: folding.BothForms, seeds: int) -> None:
    steps = set()
    for seed in range(seeds):
        candidate = session._planner.random(both.run, seed)
        assert candidate is not None
        unfolded = folding.unfolded_decision(both, candidate.decision)
        one = itemise(both.folded.formulator, both.folded.structure, candidate.decision)
        other = itemise(both.unfolded.formulator, both.unfolded.structure, unfolded)
        assert by_kind(one) == by_kind(other)
        assert step_time_s(one.charge) == pytest.approx(step_time_s(other.charge), rel=SAME)
        assert peak_bytes(one.charge) == pytest.approx(peak_bytes(other.charge), rel=SAME)
        steps.add(step_time_s(one.charge))
    assert len(both.unfolded.structure.regions.classes) > 3 * len(both.folded.structure.regions.classes)
    assert len(steps) == seeds, "the decisions are one and the same"


@pytest.mark.parametrize(
    ("name", "ac", "micro_batches"),
    [
        ("qwen3", "none", 2),
        ("bert", "selective", 2),
        ("opt", "full", 1),
        pytest.param("t5", "full", 1, marks=SLOW),
        *(
            pytest.param(name, ac, count, marks=SLOW)
            for name in (
                "gpt_neo, alternating attention",
                "bloom",
                "vit",
                "mixtral",
                "gemma2, alternating attention",
                "stablelm",
            )
            for ac, count in (("none", 1), ("selective", 2), ("full", 2))
        ),
    ],
)
def test_any_decision_costs_the_same(name: str, ac: str, micro_batches: int) -> None:
    """Seconds, collectives, and the peak: candidates at the ends of equal blocks are enough to find it."""
    check_prices(name, ac, micro_batches, seeds=2)


class Readers(nn.Module):
    """Blocks that all read one tensor, as those of a decoder do: backward, the gradient of all but one is added."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList(Reader() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read, x = self.read(x), self.first(x)
        for block in self.blocks:
            x = block(x, read)
        return self.last(x).square().mean()


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        return self.own(x).relu() * self.other(read).relu()


def test_what_all_blocks_read_is_added_up_as_often_folded() -> None:
    module = Readers()
    session = PlanningSession(
        module,
        cluster="1x4xtoy",
        example_inputs=(torch.randn(BATCH, 4, 16),),
        micro_batches=1,
        ac="none",
        dtype="fp32",
    )
    both = folding.both_forms(module, "dp=2,tp=2", session)
    uneven = [sums for members in both.folded.structure.autograd_sums for sums in members if 1 < sum(sums.values()) < 8]
    assert uneven, "all of a class add up, or none does: nothing is shown"
    check_decisions(session, both, seeds=2)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("opt", None),
        pytest.param("vit", 0.5, marks=SLOW),
        *(pytest.param(name, None, marks=SLOW) for name in ("vit", "qwen3", "bert", "bloom", "t5")),
    ],
)
def test_the_best_is_that_of_the_unfolded_program_with_equal_blocks(name: str, share: float | None) -> None:
    """Without a memory cap, and with one; what each program's plan says costs what the solver thought."""
    _, both = both_forms(name, "none", 1)
    cap = None
    if share is not None:
        free = next(folding.answers(both, None))
        cap = folding.binding_cap(both, free.peak_bytes)
        assert cap < free.peak_bytes
    found = list(folding.answers(both, cap))
    assert folding.proved(found)
    assert folding.find_faults(found) == []
    slower = folding.loss(found)
    assert slower is not None
    assert slower >= -2 * folding.MIP_GAP


@settings(deadline=None)
@given(problem=problems())
def test_tied_nodes_choose_alike(problem: Problem) -> None:
    by_choices: dict[int, list[int]] = {}
    for number, node in enumerate(problem.nodes):
        by_choices.setdefault(len(node.charges), []).append(number)
    groups = list(by_choices.values())
    # The second of a group has its choices in another order.
    options = [list(range(len(node.charges))) for node in problem.nodes]
    for group in groups:
        for number in group[1:]:
            options[number].reverse()
    tied = TiedProblem.from_groups(problem, groups, options)
    found = {}
    for assignment in itertools.product(*(range(len(node.charges)) for node in problem.nodes)):
        meant = [options[node][choice] for node, choice in enumerate(assignment)]
        if all(len({meant[node] for node in group}) == 1 for group in groups):
            with contextlib.suppress(InfeasibleAssignmentError):
                found[assignment] = totals(problem, assignment)
    alike = {}
    for assignment in itertools.product(*(range(len(node.charges)) for node in tied.problem.nodes)):
        with contextlib.suppress(InfeasibleAssignmentError):
            alike[tied.untied(assignment)] = totals(tied.problem, assignment)
    assert alike.keys() == found.keys()
    for assignment, total in found.items():
        assert alike[assignment] == pytest.approx(total)


def answer(program: str, objective_s: float, bound_s: float, priced_s: float) -> folding.Answer:
    solution = Solution(assignment=(), objective_s=objective_s, bound_s=bound_s, status="optimal", time_s=0.0)
    return folding.Answer(program=program, solution=solution, priced_s=priced_s)


def test_a_fault_is_seen() -> None:
    """The comparison is no formality: another optimum, another price and a missing answer are each said."""
    folded, equal, free = (answer(name, 1.0, 1.0, 1.0) for name in ("folded", "tied", "free"))
    assert folding.find_faults([folded, equal, free]) == []
    wrong = folding.find_faults([answer("folded", 1.01, 1.01, 1.0), equal, free])
    assert [text.partition(" ")[0] for text in wrong] == ["folded:", "folded"]
    assert folding.find_faults([folding.Answer(program="folded", solution=None), equal, free]) == [
        "only one of folded and tied fits"
    ]
    assert folding.find_faults([folded, equal, answer("free", 1.01, 1.01, 1.01)]) == [
        "the free program's bound is above the tied optimum"
    ]
