"""Loss and gradients equal the unsharded model's under plans of every planner, on four real processes, in float32."""

from __future__ import annotations

import pytest
from support.families import FAMILIES, WITH_EXPERTS, make
from support.gloo import run_on_gloo
from support.side_by_side import train_all

from planner import PlanningSession

TOLERANCE = 1e-5
BATCH = 8
MESH = "dp=2,tp=2"


def plans_of(family: str, planners: list[str], ac: str = "none") -> dict[str, dict]:
    module, inputs = make(family, BATCH)
    session = PlanningSession(
        module, cluster="1x4xtoy", example_inputs=inputs, dtype="fp32", optimizer="sgd", micro_batches=1, ac=ac
    )
    return {planner: session.plan(planner=planner, mesh=MESH).to_dict() for planner in planners}


def check_numerics(family: str, planners: list[str], ac: str = "none") -> None:
    for errors in run_on_gloo(train_all, 4, family, plans_of(family, planners, ac), "sgd"):
        for planner, error in errors.items():
            assert error.loss <= TOLERANCE, (planner, error)
            assert error.gradient <= TOLERANCE, (planner, error)
            assert error.tied, planner


SLOW = ("bert", "t5", "vit", "deepseek")
"""Families whose numbers are checked in the slow suite; the fast one has the collectives of all but DeepSeek."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in (*FAMILIES, *WITH_EXPERTS)],
)
def test_losses_and_gradients_equal_the_unsharded_models(family: str) -> None:
    tensor_parallel = ["tensor-parallel"] if family in ("llama", *WITH_EXPERTS) else []
    check_numerics(family, ["ilp", "data-parallel", "fully-sharded", *tensor_parallel, "random:0"])


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_losses_and_gradients_equal_the_unsharded_models_under_random_plans(family: str) -> None:
    check_numerics(family, [f"random:{seed}" for seed in range(1, 5)])


@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_losses_and_gradients_equal_the_unsharded_models_with_some_blocks_checkpointed(family: str) -> None:
    check_numerics(family, ["ilp", "random:1"], ac="full:1")


def test_losses_equal_the_unsharded_models_under_adamw() -> None:
    # Adam amplifies gradients that are zero but for rounding, so parameters differ; losses are compared alone.
    for errors in run_on_gloo(train_all, 4, "llama", plans_of("llama", ["ilp", "random:7"]), "adamw"):
        for planner, error in errors.items():
            assert error.loss <= 1e-4, (planner, error)
