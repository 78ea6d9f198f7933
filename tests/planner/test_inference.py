"""Prefill and decoding: seconds and bytes by hand, what is refused, and what a job says of its phase."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import transformers
from support.executor_cases import make_model
from torch.distributed.tensor import Partial

from cost_model import ClusterSpec
from cost_model.hardware.devices import find_device
from cost_model.kernels.attention import cached_attention_time_s
from planner import PlanningSession, build_plan, estimate_plan, trace_module
from planner.errors import InfeasibleError, JobError
from planner.plan.estimate import Estimate
from planner.plan.job import Job
from planner.plan.sharding_plan import ShardingPlan
from planner.tradeoffs import batches, best_batch

BATCH, SEQ, LAYERS, HEADS, WIDTH = 8, 16, 2, 4, 8
"""Of the tiny Llama: heads of keys and values, and the values of each."""


@functools.cache
def plan_of(family: str, phase: Any, mesh: str = "dp=2,tp=2", batch: int = BATCH) -> ShardingPlan:
    return build_plan(make_model(family), cluster="1x4xtoy", phase=phase, mesh=mesh, batch=batch, seq=SEQ, dtype="fp32")


def estimate_of(plan: ShardingPlan) -> Estimate:
    assert plan.estimate is not None
    return plan.estimate


def test_a_forward_has_no_other_phase() -> None:
    for phase in ("prefill", "decode"):
        plan = plan_of("llama", phase)
        found = estimate_of(plan)
        assert (found.backward_s, found.grad_reduce_s, found.optimizer_s) == (0, 0, 0)
        assert found.forward_s == pytest.approx(found.step_time_s)
        assert {row.phase for row in found.collectives} == {"forward"}
        assert not found.memory.get("gradients")
        assert not found.memory.get("optimizer_state")
        assert (plan.micro_batches, plan.job.ac, plan.job.training) == (1, "none", False)
        assert found.peak_memory_bytes == sum(found.memory.values())


@pytest.mark.parametrize(("phase", "tokens"), [("prefill", SEQ), ("decode", SEQ + 1)])
def test_the_cache_is_split_as_attention_is(phase: str, tokens: int) -> None:
    whole = 2 * LAYERS * BATCH * HEADS * WIDTH * tokens * 4
    # Sequences or heads: every axis splits one of them here.
    assert estimate_of(plan_of("llama", phase)).memory["kv_cache"] == whole / 4
    assert estimate_of(plan_of("llama", phase, "dp=1,tp=4")).memory["kv_cache"] == whole / 4
    # One sequence, and an axis of eight that no heads of keys divide: whole on each.
    alone = build_plan(make_model("llama"), cluster="1x8xtoy", phase=phase, mesh="tp=8", batch=1, seq=SEQ, dtype="fp32")
    assert estimate_of(alone).memory["kv_cache"] == whole / BATCH


def test_parameters_rest_in_the_compute_dtype() -> None:
    model = make_model("llama")
    plan = build_plan(model, cluster="1x1xtoy", phase="decode", batch=1, seq=SEQ, dtype="bf16")
    assert plan.job.master_dtype is None
    assert estimate_of(plan).memory["parameters"] == 2 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("phase", ["training", "prefill", "decode"])
def test_parameters_that_no_op_reads_are_in_the_memory(phase: Any) -> None:
    """A step of decoding reads nothing of T5's encoder, and a forward nothing of a layer that is left out."""
    model = make_model("t5")
    model.add_module("unread", torch.nn.Linear(64, 64))
    plan = build_plan(model, cluster="1x4xtoy", mesh="dp=4", phase=phase, batch=BATCH, seq=SEQ, dtype="fp32")
    whole = 4 * sum(p.numel() for p in model.parameters())
    unread = 4 * sum(p.numel() for p in model.unread.parameters())
    assert unread <= estimate_of(plan).memory["parameters"] <= whole
    alone = build_plan(model, cluster="1x1xtoy", phase=phase, batch=BATCH, seq=SEQ, dtype="fp32")
    assert estimate_of(alone).memory["parameters"] == whole


def test_decoding_is_bound_by_reading_weights_and_cache() -> None:
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=256,
        max_position_embeddings=16384,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    cluster = ClusterSpec.parse("1x8xh100-sxm-80gb")
    bandwidth = cluster.device.memory_bandwidth_bytes_per_s
    traced = trace_module(model, batch=1, seq=8192, phase="decode")

    def session(batch: int) -> PlanningSession:
        return PlanningSession(traced, cluster=cluster, phase="decode", batch=batch, seq=8192)

    alone, many = (estimate_of(session(batch).plan(mesh="tp=8")) for batch in (1, 64))
    weights_s = 2 * sum(p.numel() for p in model.model.layers.parameters()) / 8 / bandwidth
    cache_s = 2 * 4 * 8192 * 8 * 128 * 2 * 64 / 8 / bandwidth
    # Kernels reach 0.9 of the bandwidth, 0.867 of that in a step (products); a block has about fifty more, 1.3 us each.
    assert weights_s / 0.9 < alone.compute_s < weights_s / (0.9 * 0.867) + 4 * 50 * 1.3e-6
    # Nothing rests whole that is used in pieces: slicing it would read and write it once more in every step.
    assert alone.memory["parameters"] < 1.1 * 2 * sum(p.numel() for p in model.parameters()) / 8
    # 64 sequences read the weights once as well; what is more is the cache, and their longer rows.
    assert cache_s / 0.9 < many.compute_s - alone.compute_s < cache_s / 0.9 + 0.3 * alone.compute_s
    assert sum(row.count for row in alone.collectives if row.bytes == 2 * 8192) == 2 * 4


def test_cached_attention_reads_the_cache_once_or_is_bound_by_its_products() -> None:
    device = find_device("h100-sxm-80gb")
    shape = {"batch": 32, "kv_heads": 8, "tokens": 4096, "head_dim": 128, "head_dim_v": 128, "dtype": "bf16"}
    nbytes = 32 * 8 * 4096 * 256 * 2
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    grouped = cached_attention_time_s(**shape, heads=64, device=device)
    assert grouped == pytest.approx(nbytes / rate + device.kernel_launch_s)
    products = cached_attention_time_s(**shape, heads=64 * 64, device=device)
    assert products == pytest.approx(
        2 * 32 * 64 * 64 * 4096 * 256 / (device.peak_flops["bf16"] * device.gemm_efficiency) + device.kernel_launch_s
    )
    assert cached_attention_time_s(**{**shape, "tokens": 0}, heads=64, device=device) == 0.0


def test_prefill_makes_logits_of_the_last_token_alone() -> None:
    graph = trace_module(make_model("llama"), batch=BATCH, seq=SEQ, phase="prefill").graph
    (output,) = graph.outputs
    assert output.is_result
    assert graph.values[output.value].shape[1:] == (1, 256)
    assert not any(value.requires_grad for value in graph.values.values())


def test_logits_are_no_sums() -> None:
    # A head that is split by the hidden dim leaves sums, which cost nothing: nobody could read them.
    plan = build_plan(
        make_model("llama"),
        cluster="1x2xtoy",
        phase="decode",
        mesh="tp=2",
        batch=2,
        seq=SEQ,
        dtype="fp32",
        pins=["lm_head.weight:used=S(1)@tp"],
    )
    logits = plan.output_plan[""]
    assert isinstance(logits, dict)
    assert logits["logits"].source == (Partial(),)
    assert not logits["logits"].layout[0].is_partial()


def test_a_written_plan_is_priced_the_same() -> None:
    for phase in ("prefill", "decode"):
        plan = plan_of("llama", phase)
        read = ShardingPlan.from_dict(plan.to_dict())
        assert read == plan
        assert estimate_of(estimate_plan(make_model("llama"), read)) == plan.estimate


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_no_decoder_decodes(family: str) -> None:
    with pytest.raises(JobError, match="cannot decode"):
        build_plan(make_model(family), cluster="1x4xtoy", phase="decode", batch=BATCH, seq=SEQ)


def test_an_encoder_has_a_forward_and_no_cache() -> None:
    plan = plan_of("bert", "prefill")
    assert "kv_cache" not in estimate_of(plan).memory
    assert any("no key-value cache" in note for note in plan.notes)


def test_what_training_alone_has_is_refused() -> None:
    for asked in ({"micro_batches": 2}, {"ac": "full"}):
        with pytest.raises(JobError):
            build_plan(make_model("llama"), cluster="1x4xtoy", phase="prefill", batch=BATCH, seq=SEQ, **asked)
    with pytest.raises(JobError, match="traced for training"):
        build_plan(
            trace_module(make_model("llama"), batch=BATCH, seq=SEQ), cluster="1x4xtoy", phase="decode", batch=8, seq=8
        )
    with pytest.raises(JobError, match="phase"):
        Job(phase="both")  # type: ignore[arg-type]


def test_a_job_says_its_phase_once() -> None:
    assert Job().training
    assert not Job(phase="decode").training
    assert not Job(training=False).training
    assert dataclasses.replace(Job(phase="decode"), batch=4).phase == "decode"
    assert Job(phase="decode", batch=4, seq=100).items == (4, "tokens")
    assert Job(phase="prefill", batch=4, seq=100).items == (400, "tokens")


def test_batches_grow_until_the_cache_does_not_fit() -> None:
    # Four megabytes of cache for a sequence, beside parameters of less than one.
    seq = 4096
    found = batches(make_model("llama"), cluster="1x2xtoy", mesh="dp=2", seq=seq, dtype="fp32")
    assert [size.batch for size in found] == [2**power for power in range(len(found))]
    assert found[-1].plan is None
    *fitting, _ = found
    cache = 2 * LAYERS * HEADS * WIDTH * (seq + 1) * 4
    for size in fitting[1:]:
        assert size.plan is not None
        assert estimate_of(size.plan).memory["kv_cache"] == size.batch * cache / 2
    # What was not tried would not have fitted either.
    assert found[-1].batch * cache / 2 > ClusterSpec.parse("1x2xtoy").device.memory_bytes * 0.9
    best = best_batch(found)
    assert best is not None
    assert best.items_per_s == max(size.items_per_s for size in fitting)
    limit = estimate_of(fitting[0].plan).step_time_s  # type: ignore[arg-type]
    within = best_batch(found, within_s=limit)
    assert within is not None
    assert within.plan is not None
    assert estimate_of(within.plan).step_time_s <= limit
    with pytest.raises(JobError, match="inference"):
        batches(make_model("llama"), cluster="1x2xtoy", phase="training", seq=seq)


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(InfeasibleError):
        build_plan(make_model("llama"), cluster="1x1xtoy", phase="decode", batch=4096, seq=4096, dtype="fp32")
