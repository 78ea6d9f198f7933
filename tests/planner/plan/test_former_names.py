"""Former names of public fields are read wherever fields are given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from api.requests.model_configs import find_config
from api.requests.schemas import PlanRequest
from planner import PlanningSession, build_plan
from planner.errors import JobError, PlanFormatError
from planner.plan.document import parse_document
from planner.plan.former_names import FORMER_NAMES, with_current_names
from planner.wire.document import TraceDocument


def test_a_plan_with_former_names_reads_like_one_with_current_names() -> None:
    head = {"format_version": 1, "mesh": {"names": ["tp"], "shape": [2], "device": "cuda"}}
    order = {"axis": "tp", "length": 16}
    port = {"layout": ["R"], "source": ["S(1)"]}
    flags = ("tensor_overlap", "regather", "fused", "even_order")
    former = {
        **head,
        "even_order": order,
        "input_plan": {"linear.input": {**port, "regather": True}, "block.input": {"regather": port}},
        "job": {"batch": 4, "pins": ["a=R"], **dict.fromkeys(flags, True)},
    }
    current = copy.deepcopy(former)
    current["zigzag"] = current.pop("even_order")
    current["input_plan"]["linear.input"] = {**port, "reallgather": True}  # an argument of block keeps its own name
    current["job"] = with_current_names(former["job"])
    assert parse_document(former) == parse_document(current)
    with pytest.raises(PlanFormatError, match="zigzag is given twice"):
        parse_document({**current, "even_order": order})


def test_keywords_requests_and_graphs_take_former_names() -> None:
    inputs = (torch.zeros(8, 4),)
    former: dict[str, Any] = {"cluster": "1x2xtoy", "example_inputs": inputs, "tensor_overlap": True}
    with pytest.raises(JobError, match="async_tp"):
        PlanningSession(nn.Linear(4, 4), **former)
    with pytest.raises(JobError, match="async_tp"):
        build_plan(nn.Linear(4, 4), **former)
    job = {name: True for name in FORMER_NAMES if name != "packed"}
    request = PlanRequest.model_validate({"model": "gpt2", "cluster": "1x2xtoy", **job})
    assert all(getattr(request, FORMER_NAMES[name]) for name in job)
    trace = {"dtype": "bf16", "samples": 1, "batch": 1, "any_batch": False}
    assert TraceDocument.model_validate({**trace, "fused": True}).fused_ops


def test_a_models_former_suffix_is_read() -> None:
    config = find_config("gpt2+packed", allow_local=False)
    assert config == find_config("gpt2+fused-projections", allow_local=False)
    assert config is not None
    assert config.fused_projections
