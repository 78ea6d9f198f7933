"""Mixed checkpointing: baselines whose last blocks save more than their first, and what is said of their bound."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from api.render.comparison import optimality_lines
from api.requests.model_configs import find_config
from api.requests.model_registry import load_model, quiet_libraries
from planner.errors import JobError
from planner.plan.job import Checkpointing
from planner.plan.sharding_plan import ShardingPlan
from planner.session import PlanningSession
from planner.writing.reprice import estimate_plan
from planner.writing.write import bound_and_gap

pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators")

MODE = "transformer.h.*"


@cache
def model(layers: int = 4) -> Any:
    config = find_config("gpt2", allow_local=False)
    assert config is not None
    with quiet_libraries():
        return load_model({"hf_config": {**config.values, "n_layer": layers}}, seq=1024).module


def session(**options: Any) -> PlanningSession:
    return PlanningSession(model(), cluster="1x8xh100-sxm-80gb", batch=256, seq=1024, headroom=0.0, **options)


@cache
def fsdp(ac: str | None = None, share: float = 1.0) -> ShardingPlan:
    """Return the FSDP plan in one micro-batch, within a share of the memory between full checkpointing and none."""
    cap = {} if share == 1.0 else {"memory_gb": cap_bytes(share) / 1e9}
    return session(ac=ac, micro_batches=1, **cap).plan(planner="fsdp")


def cap_bytes(share: float) -> float:
    return peak(fsdp("full")) + share * (peak(fsdp("none")) - peak(fsdp("full")))


def peak(plan: ShardingPlan) -> int:
    assert plan.estimate is not None
    return plan.estimate.peak_memory_bytes


def step_s(plan: ShardingPlan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_time_s


@pytest.mark.parametrize(
    ("share", "uniform", "mixed"),
    [(0.2, "full", "full:2,selective"), (0.5, "selective", "full:2"), (0.9, "selective", "selective:1")],
)
def test_memory_that_uniform_checkpointing_leaves_free_is_used(share: float, uniform: str, mixed: str) -> None:
    plan = fsdp(None, share)
    assert plan.job.ac == mixed
    assert peak(fsdp(uniform)) <= peak(plan) <= cap_bytes(share)
    assert step_s(plan) < 0.99 * step_s(fsdp(uniform))


def test_its_price_is_that_of_the_same_plan_asked_for_and_read_from_a_file() -> None:
    plan = fsdp("full:2,selective")
    assert plan.activation_checkpointing == {"transformer.h.{0-1}": "full", "transformer.h.{2-3}": "selective"}
    assert step_s(fsdp("selective")) < step_s(plan) < step_s(fsdp("full"))
    assert peak(fsdp("full")) < peak(plan) < peak(fsdp("selective"))
    bare = dataclasses.replace(plan, estimate=None, solver=None)
    assert estimate_plan(model(), bare).estimate == plan.estimate


def test_checkpointing_that_the_job_fixes_is_kept() -> None:
    share = 0.8
    plan = session(ac="full", micro_batches=1, memory_gb=cap_bytes(share) / 1e9).plan(planner="fsdp")
    assert plan.activation_checkpointing == {MODE: "full"}


def test_on_a_given_mesh_the_baseline_is_the_same() -> None:
    cap_gb = cap_bytes(0.3) / 1e9
    free, given = (
        session(micro_batches=1, memory_gb=cap_gb).plan(planner="fsdp", mesh=mesh) for mesh in (None, "fsdp=8")
    )
    assert free.job.ac == given.job.ac
    assert free.estimate == given.estimate


def test_a_plan_below_the_bound_of_uniform_plans_has_no_gap() -> None:
    solver = fsdp(None, 0.5).solver
    assert solver is not None
    assert solver.bound_s is not None
    assert solver.objective_s is not None
    assert solver.objective_s < solver.bound_s
    assert solver.gap is None
    assert "checkpoints all blocks alike" in " ".join(optimality_lines(fsdp(None, 0.5)))


def test_the_bound_holds_for_plans_that_are_checkpointed_alike() -> None:
    assert bound_and_gap(None, 2.0, 1.0) == (1.0, 0.5)
    assert bound_and_gap(None, 1.0, 1.0 + 1e-12) == (1.0, 0.0)


def test_what_is_said_comes_back() -> None:
    assert Checkpointing.parse("full:12,selective") == Checkpointing("full", 12, "selective")
    assert str(Checkpointing("full", 12, "selective")) == "full:12,selective"
    assert str(Checkpointing("selective", 12, "none")) == "selective:12"


@pytest.mark.parametrize("text", ["full,selective", "selective:3,full", "full:3,none", "full:3,", "full:3,full", ","])
def test_other_mixtures_are_refused(text: str) -> None:
    with pytest.raises(JobError, match="ac is"):
        Checkpointing.parse(text)
