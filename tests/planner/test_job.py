"""The job refuses what cannot be, and its defaults are the ones that plans promise."""

from typing import Any

import pytest

from planner.errors import JobError
from planner.job import Job


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
    ],
)
def test_impossible_jobs_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(JobError) as caught:
        Job(**fields)
    assert caught.value.field in fields
    assert caught.value.what_to_do
