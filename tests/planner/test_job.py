"""The job refuses what cannot be, and its defaults are the ones that plans promise."""

from typing import Any

import pytest

from api.models import load_model
from cost_model import find_device
from cost_model.attention import attention_time_s
from planner import build_plan, estimate_plan
from planner.errors import JobError
from planner.job import Job, checked_kernel
from planner.plan import ShardingPlan


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


@pytest.mark.parametrize(("device", "dtype"), [("a100-sxm-80gb", "bf16"), ("toy", "bf16"), ("h100-sxm-80gb", "fp32")])
def test_a_kernel_that_does_not_run_is_refused(device: str, dtype: str) -> None:
    with pytest.raises(JobError, match="does not run") as caught:
        checked_kernel("flash3", find_device(device), dtype)
    assert caught.value.field == "attention_kernel"
    assert checked_kernel(None, find_device(device), dtype) is None


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
