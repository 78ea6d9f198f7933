"""FLOPs of the model and the host's time in an estimate, against the closed form and against counts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.small_models import TINY_LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from api.requests.model_configs import check_config
from api.requests.price_configuration import transformer_of
from cost_model.hardware.cluster import ClusterSpec
from planner import build_plan, estimate_plan
from planner.formulation.host_time import DTENSOR_OP_S
from planner.plan.estimate import Estimate
from planner.plan.sharding_plan import ShardingPlan

BATCH, SEQ = 8, 64
H100S = ClusterSpec.parse("1x2xh100-sxm-80gb")


def tiny_llama() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{k: v for k, v in TINY_LLAMA.items() if k != "model_type"}))


def planned(**options: object) -> ShardingPlan:
    job = {"cluster": H100S, "mesh": "dp=2", "batch": BATCH, "seq": SEQ, "micro_batches": 1, "ac": "none"}
    return build_plan(tiny_llama(), **{**job, **options})  # type: ignore[arg-type]


def estimate_of(plan: ShardingPlan) -> Estimate:
    assert plan.estimate is not None
    return plan.estimate


@pytest.fixture(scope="module")
def plain() -> ShardingPlan:
    return planned()


def test_model_flops_are_those_of_the_closed_form(plain: ShardingPlan) -> None:
    spec = transformer_of(check_config(TINY_LLAMA, name="tiny"))
    assert estimate_of(plain).model_flops == pytest.approx(spec.model_flops(BATCH * SEQ, SEQ), rel=0.02)


def test_neither_micro_batches_nor_recomputation_change_the_models_flops(plain: ShardingPlan) -> None:
    other = estimate_of(planned(micro_batches=2, ac="full"))
    assert other.model_flops == pytest.approx(estimate_of(plain).model_flops)


def test_the_host_dispatches_every_micro_batch_and_the_recomputation(plain: ShardingPlan) -> None:
    one, two, recomputed = (estimate_of(p).host_s or 0.0 for p in (plain, planned(micro_batches=2), planned(ac="full")))
    assert 1.7 * one < two < 2.1 * one
    assert 1.1 * one < recomputed < 1.7 * one
    # Two blocks of some 50 ops each way, and no more than 300.
    assert 100 * DTENSOR_OP_S < one < 1200 * DTENSOR_OP_S


def test_an_inference_step_has_a_forward_alone(plain: ShardingPlan) -> None:
    prefill = estimate_of(planned(phase="prefill"))
    # The logits of the last token alone are computed.
    other_logits = 2.0 * BATCH * (SEQ - 1) * TINY_LLAMA["hidden_size"] * TINY_LLAMA["vocab_size"]
    assert prefill.model_flops == pytest.approx((estimate_of(plain).model_flops or 0.0) / 3 - other_logits)
    assert (prefill.host_s or 0.0) < 0.6 * (estimate_of(plain).host_s or 0.0)


def test_a_plan_that_is_priced_again_has_the_same_figures(plain: ShardingPlan) -> None:
    again = estimate_of(estimate_plan(tiny_llama(), dataclasses.replace(plain, estimate=None)))
    assert (again.model_flops, again.host_s) == (estimate_of(plain).model_flops, estimate_of(plain).host_s)


def test_a_fictitious_device_has_no_host() -> None:
    assert estimate_of(planned(cluster="1x2xtoy")).host_s is None
