"""Experts that are spread over ranks and get unequally many tokens: seconds and bytes of the busiest rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support import families

from planner import build_plan
from planner.errors import JobError
from planner.model_rewrites.experts.experts_op import ExpertsForm
from planner.model_rewrites.experts.work import ExpertsWork
from planner.plan.sharding_plan import Estimate, ShardingPlan
from planner.writing.reprice import estimate_plan

EXPERTS = "model.layers.*.mlp.experts"
SPREAD = (f"{EXPERTS}.gate_up_proj:used=S(0)@ep", f"{EXPERTS}.down_proj:used=S(0)@ep")


def plan(imbalance: float, **options: Any) -> ShardingPlan:
    model, inputs = families.make("mixtral", 8)
    job = {"cluster": "1x4xtoy", "mesh": "ep=4", "dtype": "fp32", "ac": "none", "micro_batches": 1, "memory_gb": 10}
    return build_plan(model, example_inputs=inputs, **{**job, **options}, expert_imbalance=imbalance)


def estimate(imbalance: float, **options: Any) -> Estimate:
    found = plan(imbalance, **options).estimate
    assert found is not None
    return found


def exchanged(of: Estimate) -> dict[tuple[str, int, int], float]:
    """Return (phase, bytes, calls) of each all-to-all -> seconds."""
    return {(row.phase, row.bytes, row.count): row.time_s for row in of.collectives if row.kind == "all_to_all"}


def test_the_busiest_rank_computes_exchanges_and_holds_more() -> None:
    model, inputs = families.make("mixtral", 8)
    written = plan(1.0, pins=SPREAD)
    busier = dataclasses.replace(written, job=dataclasses.replace(written.job, expert_imbalance=2.0))
    even, busy = (estimate_plan(model, each, example_inputs=inputs).estimate for each in (written, busier))
    assert even is not None
    assert busy is not None
    assert exchanged(even), "the pins ask for expert parallelism by all-to-all"
    assert exchanged(even).keys() == exchanged(busy).keys(), "a plan states the mean, which is what is verified"
    assert all(exchanged(busy)[row] >= seconds for row, seconds in exchanged(even).items())
    assert sum(exchanged(busy).values()) > sum(exchanged(even).values())
    assert busy.compute_s > even.compute_s
    assert busy.peak_memory_bytes > even.peak_memory_bytes


def test_experts_on_every_rank_have_no_busiest_rank() -> None:
    even, busy = (estimate(imbalance, planner="fsdp") for imbalance in (1.0, 3.0))
    assert even == busy
    assert plan(3.0, planner="fsdp").job.expert_imbalance == 3.0


def test_rows_by_hand() -> None:
    work = ExpertsWork(rows=100, tokens=40, experts=2, inner=8, width=16, itemsize=4, form=ExpertsForm("silu"), ranks=4)
    assert work.on_busiest_rank(1.25).rows == 125
    assert work.on_busiest_rank(1.25).received_nbytes == 125 * 16 * 4
    assert work._replace(ranks=1).on_busiest_rank(1.25).rows == 100


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_a_ratio_below_one_is_refused(wrong: float) -> None:
    with pytest.raises(JobError, match=r"expert_imbalance"):
        plan(wrong)
