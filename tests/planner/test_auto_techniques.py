"""``techniques="auto"`` keeps what pays, says how much each gives, and its plans run as planned."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from support.small_models import TINY_LLAMA
from torch import nn

from executor.verify import verify
from planner import PlanningSession, build_plan, estimate_plan, trace_module
from planner.auto_techniques import CONSIDERED, LEAST_GAIN, NOTHING_PAYS
from planner.errors import JobError, ModelError
from planner.plan.sharding_plan import ShardingPlan

JOB: dict[str, Any] = {"cluster": "1x4xtoy", "batch": 8, "seq": 32, "dtype": "fp32"}
FIXED: dict[str, Any] = {**JOB, "mesh": "dp=2,tp=2", "micro_batches": 1, "ac": "none"}


def llama() -> nn.Module:
    values = {name: value for name, value in TINY_LLAMA.items() if name != "model_type"}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).train()


def inputs() -> dict[str, Any]:
    ids = torch.zeros(8, 32, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids, "use_cache": False}


LONG: dict[str, Any] = {"cluster": "1x4xh100-sxm-80gb", "batch": 1, "seq": 32_768}
"""One long sequence on four ranks, with two key-value heads: attention's sequence is sharded."""


def long_llama() -> nn.Module:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    with torch.device("meta"):
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=512)
        return transformers.LlamaForCausalLM(config).train()


def step_s(plan: ShardingPlan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_time_s


@pytest.fixture(scope="module")
def auto() -> ShardingPlan:
    return build_plan(long_llama(), **LONG, mesh="tp=4", techniques="auto")


def at_the_configuration(plan: ShardingPlan, techniques: list[str]) -> ShardingPlan:
    return build_plan(
        long_llama(),
        **LONG,
        mesh=str(plan.mesh),
        micro_batches=plan.micro_batches,
        ac=plan.job.ac,
        techniques=techniques,
        tolerance=0.0,
    )


def test_each_technique_of_auto_gives_its_share(auto: ShardingPlan) -> None:
    names = [technique.name for technique in auto.techniques]
    assert names == ["fused-ops", "zigzag"]
    with_all_s = step_s(at_the_configuration(auto, names))
    for technique in auto.techniques:
        others = [name for name in names if name != technique.name]
        without_s = step_s(at_the_configuration(auto, others))
        assert technique.gain_s == pytest.approx(without_s - with_all_s)
        assert without_s >= with_all_s * (1 + LEAST_GAIN)
    assert step_s(auto) < step_s(build_plan(long_llama(), **LONG, mesh="tp=4"))
    assert auto.timings["techniques_s"] > 0


def test_what_was_left_out_would_not_have_given_its_share(auto: ShardingPlan) -> None:
    names = [technique.name for technique in auto.techniques]
    with_all_s = step_s(at_the_configuration(auto, names))
    for name in set(CONSIDERED) - set(names):
        assert step_s(at_the_configuration(auto, [*names, name])) > with_all_s / (1 + LEAST_GAIN)


def test_a_plan_of_auto_runs_and_is_priced_for_the_model_as_it_is(auto: ShardingPlan) -> None:
    assert ShardingPlan.from_dict(auto.to_dict()) == auto
    ids = torch.zeros(1, LONG["seq"], dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    assert verify(long_llama(), auto, example_inputs=inputs).equal
    again = estimate_plan(long_llama(), auto)
    assert step_s(again) == pytest.approx(step_s(auto))
    assert again.techniques == auto.techniques


def test_fused_projections_are_planned_run_and_priced_for_the_plain_model() -> None:
    plan = build_plan(llama(), **FIXED, techniques=["fused-projections"])
    assert plan.job.fused_projections
    assert [technique.name for technique in plan.techniques] == ["fused-projections"]
    assert any("qkv_proj" in name for name in plan.plan)
    assert verify(llama(), plan, example_inputs=inputs()).equal
    assert step_s(estimate_plan(llama(), plan)) == pytest.approx(step_s(plan))
    model = llama()
    build_plan(model, **FIXED, techniques=["fused-projections"])
    assert any("q_proj" in name for name, _ in model.named_parameters())
    tensor_parallel = build_plan(llama(), **FIXED, techniques=["fused-projections"], planner="tensor-parallel")
    assert any("qkv_proj" in name for name in tensor_parallel.plan)
    with pytest.raises(ModelError, match="fused-projections out"):
        build_plan(
            nn.Linear(4, 4), cluster="4xtoy", example_inputs=(torch.zeros(8, 4),), techniques="fused-projections"
        )


def test_a_list_is_used_as_given_without_gains() -> None:
    job = {**FIXED, "mesh": "dp=4", "planner": "data-parallel"}
    plan = build_plan(llama(), **job, techniques="fused-ops,zigzag,reallgather")
    # The baseline splits the batch only: no sequence is sharded and no input is gathered.
    assert [(technique.name, technique.gain_s) for technique in plan.techniques] == [("fused-ops", None)]
    assert build_plan(llama(), **FIXED).techniques == ()


def test_auto_adds_to_the_techniques_that_are_named() -> None:
    plan = build_plan(llama(), **FIXED, techniques=["auto", "fused-projections"])
    gains = {technique.name: technique.gain_s for technique in plan.techniques}
    assert gains.pop("fused-projections") is None
    assert all(gain_s is not None for gain_s in gains.values())


def test_a_model_that_gains_nothing_keeps_its_plan_and_is_told_so() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    job: dict[str, Any] = {"cluster": "1x2xtoy", "example_inputs": (torch.zeros(8, 8),), "dtype": "fp32"}
    plan, plain = build_plan(module, **job, techniques="auto"), build_plan(module, **job)
    assert plan.techniques == ()
    assert NOTHING_PAYS in plan.notes
    timeless = {"timings": {}, "notes": (), "solver": None}
    assert dataclasses.replace(plan, **timeless) == dataclasses.replace(plain, **timeless)


def test_a_traced_model_keeps_its_graph() -> None:
    traced = trace_module(llama(), batch=8, seq=32, dtype="fp32", micro_batches=1)
    plan = build_plan(traced, **FIXED, techniques="auto")
    assert not plan.job.fused_ops
    assert not plan.job.fused_projections


def test_a_session_and_a_random_plan_take_no_auto() -> None:
    with pytest.raises(JobError, match="not auto"):
        PlanningSession(llama(), **JOB, techniques="auto")
    with pytest.raises(JobError, match="random"):
        build_plan(llama(), **FIXED, techniques="auto", planner="random:1")


def test_inference_takes_what_inference_has() -> None:
    plan = build_plan(llama(), cluster="1x2xtoy", batch=4, seq=16, dtype="fp32", phase="prefill", techniques="auto")
    assert {technique.name for technique in plan.techniques} <= {"fused-ops", "fused-projections"}
