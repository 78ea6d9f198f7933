"""The job refuses what cannot be, and its defaults are the ones that plans promise."""

import dataclasses
from typing import Any

import pytest
import torch
from support import families

from api.requests.model_registry import load_model
from cost_model import find_device
from cost_model.kernels.attention import attention_time_s
from planner import PlanningSession, build_plan, estimate_plan
from planner.errors import JobError
from planner.plan.job import Job
from planner.plan.sharding_plan import ShardingPlan


def test_defaults() -> None:
    job = Job()
    assert (job.training, job.optimizer, job.dtype, job.master_dtype) == (True, "adamw", "bf16", "fp32")
    assert (job.state_dtype, job.reduce_dtype, job.mip_gap, job.dropout) == ("fp32", "fp32", 1e-3, "as-configured")
    assert (job.flash_attention, job.memory_bytes, job.micro_batches, job.ac) == (None, None, None, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"batch": 0},
        {"dtype": "bf17"},
        {"optimizer": "adamx"},
        {"master_dtype": "x"},
        {"ac": "some"},
        {"mip_gap": 1.0},
        {"batch": 6, "micro_batches": 4},
        {"attention_kernel": "flash1"},
    ],
)
def test_impossible_jobs_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(JobError) as caught:
        Job(**fields)
    assert caught.value.field in fields
    assert caught.value.what_to_do


def inputs_of(batch: int, seq: int) -> dict[str, Any]:
    ids = torch.zeros(batch, seq, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
@pytest.mark.parametrize(
    ("family", "device", "dtype", "why"),
    [
        ("llama", "a100-sxm-80gb", "bf16", "a100-sxm-80gb does not run"),
        ("llama", "toy", "bf16", "does not run"),
        ("llama", "h100-sxm-80gb", "fp32", "fp32"),
        ("gpt2 as it ships", "h100-sxm-80gb", "bf16", "dropout"),
        ("t5", "h100-sxm-80gb", "bf16", "mask"),
        ("deepseek", "h100-sxm-80gb", "bf16", "head dims"),
    ],
)
def test_a_kernel_that_does_not_run_is_refused(family: str, device: str, dtype: str, why: str) -> None:
    if family == "gpt2 as it ships":
        module, inputs = load_model("gpt2", batch=8, seq=16).module, inputs_of(8, 16)
    else:
        module, inputs = families.make(family, 8)
    job = {"cluster": f"1x8x{device}", "dtype": dtype, "micro_batches": 1, "example_inputs": inputs}
    with pytest.raises(JobError, match=why) as caught:
        PlanningSession(module, attention_kernel="flash3", **job)
    assert caught.value.field == "attention_kernel"
    plan = build_plan(module, planner="data-parallel", **job)
    asked = dataclasses.replace(plan, job=dataclasses.replace(plan.job, attention_kernel="flash3"))
    with pytest.raises(JobError, match=why):
        estimate_plan(module, asked, example_inputs=inputs)


def test_attention_is_priced_in_the_kernel_that_is_asked_for() -> None:
    plans = [
        build_plan(
            load_model("llama-3.1-8b", batch=8, seq=32768).module,
            cluster="1x8xh100-sxm-80gb",
            batch=8,
            seq=32768,
            mesh="dp=8",
            micro_batches=1,
            ac="full",
            headroom=0.0,
            attention_kernel=kernel,
        )
        for kernel in (None, "flash3")
    ]
    seconds = []
    for plan in plans:
        assert plan.estimate is not None
        seconds.append(plan.estimate.compute_s)
    one = {"batch": 1, "heads": 32, "kv_heads": 8, "seq_q": 32768, "seq_k": 32768, "head_dim": 128, "causal": True}
    device = find_device("h100-sxm-80gb")

    def of_kernel(kernel: str) -> float:
        passes = [
            attention_time_s(**one, backward=backward, device=device, dtype="bf16", kernel=kernel)
            for backward in (False, False, True)  # forward twice: all is checkpointed
        ]
        return 32 * sum(passes)

    assert seconds[0] - seconds[1] == pytest.approx(of_kernel("flash") - of_kernel("flash3"), rel=1e-3)
    assert seconds[1] < seconds[0]
    read = ShardingPlan.from_dict(plans[1].to_dict())
    assert read.job.attention_kernel == "flash3"
    again = estimate_plan(load_model("llama-3.1-8b", batch=8, seq=32768).module, read).estimate
    assert again is not None
    assert again.compute_s == pytest.approx(seconds[1])
