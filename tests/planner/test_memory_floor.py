"""What is counted from the structure alone is less than any plan needs, and close enough to spare work."""

from __future__ import annotations

import itertools
from typing import Any

import families
import pytest

from cost_model.layout import MeshSpec
from planner.ilp import least_memory_bound
from planner.session import PlanningSession


@pytest.mark.parametrize(
    ("family", "optimizer", "dtype"),
    [("mlp", "adamw", "fp32"), ("gpt2", "sgd", "bf16"), ("llama", "adamw", "bf16"), ("t5", "adamw", "fp32")],
)
def test_no_plan_goes_below(family: str, optimizer: str, dtype: str) -> None:
    module, inputs = families.make(family, 8)
    options: dict[str, Any] = {"optimizer": optimizer, "dtype": dtype, "cluster": "1x4xtoy"}
    search = PlanningSession(module, example_inputs=inputs, **options)._search
    modes = ("none", "selective", "full") if search.traced.blocks.patterns else ("none",)
    shares = []
    for mesh, count, ac in itertools.product(("dp=4", "dp=2,tp=2"), (1, 2, 8), modes):
        run = search.run_of(MeshSpec.parse(mesh), count, ac)
        formulation = search.formulate(run, None)[2]
        assert formulation is not None
        least = least_memory_bound(formulation.problem)
        assert least is not None
        shares.append(search.least_memory_bytes(run) / least)
    assert max(shares) <= 1 + 1e-9
    assert max(shares) > 0.5
