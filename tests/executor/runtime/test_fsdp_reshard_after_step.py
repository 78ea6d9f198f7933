"""FSDP groups that reshard after the step: planned where that pays and fits, and run as planned."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support import families

from cost_model import ClusterSpec
from executor.verify import verify
from planner.errors import InfeasibleError
from planner.plan.sharding_plan import ShardingPlan
from planner.session import PlanningSession
from planner.writing.reprice import estimate_plan

SLOW: dict[str, Any] = {
    "nodes": 4,
    "devices_per_node": 1,
    "device": "toy",
    "inter_node": {"bandwidth_bytes_per_s": 1e7},
}
"""A cluster with slow links between nodes: gathering parameters takes longer than computing."""
BATCH = 16
BLOCKS = "model.layers.*"


def session_of(**options: Any) -> tuple[PlanningSession, Any, Any]:
    module, inputs = families.make("llama", BATCH)
    job = {"micro_batches": 4, "ac": "none", "dtype": "fp32", **options}
    return (
        PlanningSession(module, cluster=ClusterSpec.parse(SLOW), example_inputs=inputs, **job),
        module,
        families.make("llama", BATCH // job["micro_batches"])[1],
    )


def flat_rows(plan: ShardingPlan) -> dict[tuple[str, str], int]:
    """Return (kind, phase) -> calls of the collectives of a block's parameters and gradients."""
    assert plan.estimate is not None
    largest = max(row.bytes for row in plan.estimate.collectives if row.kind == "reduce_scatter")
    return {(row.kind, row.phase): row.count for row in plan.estimate.collectives if row.bytes == largest}


@pytest.mark.parametrize("ac", ["none", "full"])
def test_many_micro_batches_over_slow_links_reshard_after_the_step(ac: str) -> None:
    session, module, inputs = session_of(ac=ac)
    plan = session.plan(planner="fully-sharded", mesh="dp=4")
    assert plan.keep_gathered_for_step == (BLOCKS,)
    assert flat_rows(plan) == {("all_gather", "param_gather"): 2, ("reduce_scatter", "grad_reduce"): 2}
    assert verify(module, plan, inputs).equal


def test_resharding_after_the_step_takes_more_memory_and_less_time() -> None:
    session, _, _ = session_of()
    after_step = session.plan(planner="fully-sharded", mesh="dp=4")
    assert after_step.estimate is not None
    with pytest.raises(InfeasibleError) as error:
        session_of(memory_gb=1e-9)[0].plan(planner="fully-sharded", mesh="dp=4")
    assert error.value.least_bytes is not None
    session, module, inputs = session_of(memory_gb=1.01 * error.value.least_bytes / 1e9)
    plan = session.plan(planner="fully-sharded", mesh="dp=4")
    assert plan.estimate is not None
    assert plan.keep_gathered_for_step == ()
    assert plan.estimate.step_time_s > after_step.estimate.step_time_s
    assert plan.estimate.peak_memory_bytes < after_step.estimate.peak_memory_bytes
    assert flat_rows(plan)["reduce_scatter", "backward"] == 2 * 4
    assert verify(module, plan, inputs).equal


def test_the_main_planner_chooses_it() -> None:
    """Data parallelism communicates as much, but every rank's optimizer updates all parameters."""
    session, module, inputs = session_of()
    plan = session.plan(mesh="dp=4")
    assert plan.keep_gathered_for_step == (BLOCKS,)
    assert verify(module, plan, inputs).equal


def test_with_one_micro_batch_nothing_reshards_after_the_step() -> None:
    session, _, _ = session_of(micro_batches=1)
    assert session.plan(planner="fully-sharded", mesh="dp=4").keep_gathered_for_step == ()


@pytest.mark.parametrize(("dtype", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_memory_has_gathered_parameters_and_unreduced_gradients(dtype: str, itemsize: int) -> None:
    """By hand: parameters in the compute dtype, and all gradients in fp32 instead of a quarter of them."""
    session, module, _ = session_of(dtype=dtype)
    plan = session.plan(planner="fully-sharded", mesh="dp=4")
    assert plan.keep_gathered_for_step == (BLOCKS,)
    inputs = families.make("llama", BATCH)[1]
    resharded = estimate_plan(module, dataclasses.replace(plan, keep_gathered_for_step=()), example_inputs=inputs)
    assert plan.estimate is not None
    assert resharded.estimate is not None
    numel = sum(p.numel() for name, p in module.named_parameters() if name.startswith("model.layers."))
    more = {role: plan.estimate.memory[role] - resharded.estimate.memory[role] for role in ("parameters", "gradients")}
    assert more["parameters"] == numel * itemsize
    # In bf16, the gradients of one block and micro-batch are added while its backward runs.
    own = more["gradients"] - numel * 4 * (1 - 1 / 4)
    assert own == 0 if dtype == "fp32" else 0 <= own <= numel / 2 * itemsize
