"""Plans for prefill and decoding run the collectives of their estimates, on fake processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.executor_cases import make_model
from torch.distributed.device_mesh import init_device_mesh

from executor.shard import shard_module
from executor.torch_internals.dtensor import fake_process_group
from executor.verify import verify
from planner import PlanningSession
from planner.errors import PlanError
from planner.graph.example_inputs import inputs_from_config

BATCH, SEQ = 8, 16
CASES = [
    ("llama", "prefill"),
    ("llama", "decode"),
    ("vit", "prefill"),
    *(pytest.param(f, p, marks=pytest.mark.slow) for f in ("gpt2", "mixtral") for p in ("prefill", "decode")),
    *(pytest.param(family, "prefill", marks=pytest.mark.slow) for family in ("bert", "t5", "deepseek")),
]


@pytest.mark.parametrize(("family", "phase"), CASES)
def test_plans_run_as_planned(family: str, phase: Any) -> None:
    model = make_model(family)
    session = PlanningSession(model, cluster="1x4xtoy", phase=phase, batch=BATCH, seq=SEQ, dtype="fp32")
    inputs = dict(inputs_from_config(model, batch=BATCH, seq=SEQ, phase=phase).kwargs)
    kinds: set[str] = set()
    for mesh in ("dp=2,tp=2", "dp=1,tp=4"):
        for planner in ("ilp", "random:0", "random:1"):
            report = verify(model, session.plan(planner=planner, mesh=mesh), inputs)
            assert report.equal, report.differences
            kinds.update(row.kind for row in report.observed)
            assert {row.phase for row in report.observed} <= {"forward"}
    # Plans without any collective would prove nothing.
    assert len(kinds) > 1


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_plans_with_fused_ops_run_as_planned(phase: Any) -> None:
    model = make_model("llama")
    session = PlanningSession(model, cluster="1x4xtoy", phase=phase, batch=BATCH, seq=SEQ, dtype="fp32", fused_ops=True)
    inputs = dict(inputs_from_config(model, batch=BATCH, seq=SEQ, phase=phase).kwargs)
    for planner in ("ilp", "random:0", "random:1"):
        plan = session.plan(planner=planner, mesh="dp=2,tp=2")
        assert any("5 rms_norm" in note for note in plan.notes)
        report = verify(model, plan, inputs)
        assert report.equal, report.differences


def test_prefill_is_verified_with_a_cache() -> None:
    model = make_model("llama")
    plan = PlanningSession(model, cluster="1x4xtoy", phase="prefill", batch=BATCH, seq=SEQ, dtype="fp32").plan(
        planner="random:2", mesh="dp=2,tp=2"
    )
    inputs = {**inputs_from_config(model, batch=BATCH, seq=SEQ, phase="prefill").kwargs, "use_cache": True}
    assert verify(model, plan, inputs).equal


def test_decoding_needs_keyword_arguments() -> None:
    model = make_model("llama")
    plan = PlanningSession(model, cluster="1x2xtoy", phase="decode", batch=2, seq=SEQ).plan(mesh="tp=2")
    with pytest.raises(PlanError, match="input_ids"):
        verify(model, plan, (torch.zeros(2, 1, dtype=torch.long),))


def test_parameters_are_stored_in_the_compute_dtype() -> None:
    model = make_model("llama")
    plan = PlanningSession(model, cluster="1x2xtoy", phase="decode", batch=2, seq=SEQ, dtype="bf16").plan(mesh="tp=2")
    with fake_process_group(2):
        shard_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan, src_data_rank=None)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
