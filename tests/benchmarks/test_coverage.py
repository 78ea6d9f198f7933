"""The benchmark of which models can be planned: its lists, and what it says of a case."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from covered.coverage import Case, Row, cases, document, run, run_apart, summary, support_matrix
from torch import nn


class NothingToTrain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("never ran")


def case(module: nn.Module) -> Case:
    return Case(name="one", group="plain", make=lambda: (module, (torch.randn(8, 16),)))


def test_the_lists_are_as_long_as_they_say() -> None:
    groups = [each.group for each in cases()]
    assert {group: groups.count(group) for group in dict.fromkeys(groups)} == {
        "tp-plan": 164,
        "popular": 60,
        "plain": 100,
        "vision": 20,
    }
    assert len({(each.group, each.name) for each in cases()}) == len(groups)


def test_a_case_ends_in_what_came_of_it() -> None:
    verified = run_apart(case(nn.Linear(16, 16)), 100.0)
    assert verified.result == "verified"
    assert verified.planning_s is not None
    refused = run(case(NothingToTrain()))
    assert refused.result == "refused"
    assert "needs a gradient" in refused.cause
    assert run(case(Fails())).result == "no eager run"
    assert summary([verified, refused]) in document([verified, refused])
    assert "| plain | 2 | 1 | 0 | 1 | 0 |" in summary([verified, refused])
    assert "| one | refused |" in support_matrix([verified, refused])


def test_a_case_beyond_the_limit_is_too_slow(tmp_path: Path) -> None:
    assert run_apart(case(nn.Linear(16, 16)), 0.0) == Row(
        name="one", group="plain", result="too slow", cause="no plan after 0 s"
    )


def test_the_page_of_the_documentation_is_that_of_the_results() -> None:
    root = Path(__file__).parents[2]
    lines = (root / "benchmarks/results/coverage.jsonl").read_text(encoding="utf-8").splitlines()
    page = (root / "docs/reference/architectures.md").read_text(encoding="utf-8")
    assert page == support_matrix([Row(**json.loads(line)) for line in lines])
