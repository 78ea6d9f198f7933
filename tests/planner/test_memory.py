"""Predicted peaks against torch's MemTracker on a few combinations; `benchmarks/memory.py` has the whole table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import memory

TOLERANCE = 0.03


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("plan", "ac"),
    [("DP", "none"), ("DP", "full"), ("FSDP", "selective"), ("FSDP", "full"), ("TP", "none"), ("TP", "full")],
)
def test_the_peak_is_what_memtracker_counts(plan: str, ac: str) -> None:
    found = memory.outcome(memory.CASES["llama"], plan, ac, "fp32")
    assert found.predicted_bytes == pytest.approx(found.measured_bytes, rel=TOLERANCE)
