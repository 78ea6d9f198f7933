"""A solver process that plans all day does not grow: nothing of a job stays once it has ended."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

from support.small_models import TINY_REQUEST

from api.jobs.solve import solve


def plan(batch: int) -> dict[str, Any]:
    outcome = solve({**TINY_REQUEST, "batch": batch}, lambda event: None, 60.0)
    assert "plan" in outcome
    return outcome


def kinds_alive() -> Counter[str]:
    gc.collect()
    kinds = Counter(type(item).__name__ for item in gc.get_objects())
    return Counter({kind: count for kind, count in kinds.items() if kind in KINDS})


KINDS = {"Op", "OpGraph", "Value", "Crossing", "FakeTensor", "OutputSharding", "OpSchema", "TensorMetadata"}
"""Types of which a job makes hundreds: of the traced graph, and of torch's caches of shapes and layouts."""


def test_what_a_job_made_goes_with_it() -> None:
    plan(8)
    before = kinds_alive()
    for batch in (16, 24, 32):
        plan(batch)
    assert kinds_alive() - before == Counter()
