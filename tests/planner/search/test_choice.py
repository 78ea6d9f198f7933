"""The choice among plans: tied, robust and stable plans, and the fastest without a tolerance."""

from __future__ import annotations

from typing import get_args

import pytest

from planner.plan.estimate import Perturbation
from planner.search.choice import ROBUST_SHARE, Choice, Contender, choose

NAMES: tuple[Perturbation, ...] = get_args(Perturbation)


def contender(plan: str, step_time_s: float, axes: int, *perturbed_s: float) -> Contender[str]:
    """Return a contender; without ``perturbed_s`` it is slowed down by the same share under every perturbation."""
    under = perturbed_s or tuple(1.1 * step_time_s for _ in NAMES)
    return Contender(plan=plan, step_time_s=step_time_s, axes=axes, perturbed_s=dict(zip(NAMES, under, strict=True)))


def chosen(choice: Choice[str]) -> tuple[str, bool, str | None]:
    return choice.contender.plan, choice.is_fastest, choice.loses_under


OPTIMUM = contender("optimum", 1.0, 2)


def test_without_a_tolerance_the_fastest_plan_is_chosen() -> None:
    baselines = [contender("fsdp", 1.0, 1), contender("hsdp", 1.0 + 1e-12, 2)]
    assert chosen(choose(OPTIMUM, baselines, 0.0)) == ("optimum", True, None)
    faster = contender("fsdp", 0.9995, 1)
    assert chosen(choose(OPTIMUM, [faster], 0.0)) == ("fsdp", True, None)


@pytest.mark.parametrize(("slower", "plan"), [(1.0, "fsdp"), (1.02, "fsdp"), (1.0201, "optimum")])
def test_a_tied_plan_with_fewer_axes_is_chosen(slower: float, plan: str) -> None:
    choice = choose(OPTIMUM, [contender("fsdp", slower, 1)], 0.02)
    assert chosen(choice) == (plan, slower == 1.0 or plan == "optimum", None)
    assert {each.plan for each in choice.among} == {"optimum", "fsdp"}


def test_of_tied_plans_with_as_many_axes_the_first_baseline_is_chosen() -> None:
    baselines = [contender("ddp", 1.015, 1), contender("fsdp", 1.001, 1), contender("hsdp", 1.0, 2)]
    assert choose(OPTIMUM, baselines, 0.02).contender.plan == "ddp"
    assert choose(OPTIMUM, baselines, 0.01).contender.plan == "fsdp"
    assert choose(OPTIMUM, baselines[2:], 0.01).contender.plan == "hsdp"


def test_a_tied_plan_with_more_axes_is_not_chosen() -> None:
    optimum = contender("optimum", 1.0, 1)
    assert choose(optimum, [contender("hsdp", 1.0, 2)], 0.02).contender.plan == "optimum"


@pytest.mark.parametrize("loses_under", NAMES)
def test_a_simpler_plan_that_wins_under_a_perturbation_is_chosen(loses_under: Perturbation) -> None:
    under = {name: 1.2 if name == loses_under else 1.1 for name in NAMES}
    optimum = contender("optimum", 1.0, 2, *under.values())
    simpler = contender("fsdp", 1.04, 1, *(1.14 for _ in NAMES))
    assert chosen(choose(optimum, [simpler], 0.02)) == ("fsdp", False, loses_under)
    too_slow = contender("fsdp", 1.0 + ROBUST_SHARE + 1e-6, 1, *(1.14 for _ in NAMES))
    assert chosen(choose(optimum, [too_slow], 0.02)) == ("optimum", True, None)
    more_axes = contender("fsdp-tp", 1.04, 3, *(1.14 for _ in NAMES))
    assert choose(optimum, [more_axes], 0.02).contender.plan == "optimum"


def test_a_plan_that_is_far_behind_under_a_perturbation_is_not_chosen() -> None:
    """Data parallelism is tied, but slow links make it 10 % slower than FSDP."""
    ddp, fsdp = contender("ddp", 1.01, 1, 1.21, 1.1, 1.1), contender("fsdp", 1.015, 1, 1.1, 1.1, 1.1)
    assert choose(contender("optimum", 1.0, 2), [ddp, fsdp], 0.02).contender.plan == "fsdp"
    assert choose(contender("optimum", 1.0, 2), [ddp, fsdp], 0.2).contender.plan == "ddp"


def test_a_large_tolerance_gives_the_simplest_plan() -> None:
    baselines = [contender("ddp", 1.9, 1), contender("fsdp", 1.2, 1)]
    assert chosen(choose(OPTIMUM, baselines, 1.0)) == ("ddp", False, None)


def test_a_pipeline_is_compared_by_its_step_time_alone() -> None:
    pipeline = Contender(plan="pipeline", step_time_s=1.0, axes=2)
    fsdp = Contender(plan="fsdp", step_time_s=1.01, axes=1)
    assert choose(pipeline, [fsdp], 0.02).contender.plan == "fsdp"
    assert choose(pipeline, [fsdp], 0.005).contender.plan == "pipeline"


def test_where_no_plan_is_stable_the_one_that_is_least_behind_is_chosen() -> None:
    optimum = contender("optimum", 1.0, 2, 1.3, 1.1, 1.1)
    fsdp = contender("fsdp", 1.04, 1, 1.1, 1.1, 1.2)
    assert chosen(choose(optimum, [fsdp], 0.02)) == ("fsdp", False, "slow-communication")
    assert choose(contender("optimum", 1.0, 2, 1.18, 1.1, 1.1), [fsdp], 0.02).contender.plan == "optimum"
