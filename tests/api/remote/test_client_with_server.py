"""Models that the server does not have, planned by a real server from their graphs as they are planned here."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx2
import pytest
import torch
import torch.nn.functional as F
from support.serving import Server
from torch import nn

from api.remote.client import RemotePlanningError, RemoteShardingPlanner
from api.render.explanation import explanation_dict
from api.requests.model_configs import read_preset
from api.requests.model_registry import load_model
from planner import build_plan
from planner.explanation import explain
from planner.graph.trace_module import trace_module
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import ASKING_SERVER, TRACING, ProgressEvent, SweepProgress
from planner.tradeoffs import sweep
from planner.wire.codec import write_graph
from planner.wire.document import text_of

JOB: dict[str, Any] = {"cluster": "1x4xtoy", "dtype": "fp32"}


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(y)) * self.up(y))


class Private(nn.Module):
    """Nobody's model but this test's: no config, tied weights, a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(128, 32), nn.Sequential(*(Gated(32) for _ in range(3)))
        self.head = nn.Linear(32, 128, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.embed(ids))).flatten(0, 1), labels.flatten())


def without_timings(plan: ShardingPlan) -> str:
    """Return all of a plan, as it is written, but how long it took to find."""
    data = plan.to_dict()
    del data["timings"]
    del data["solver"]["time_s"]
    return json.dumps(data)


def private() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    ids = torch.zeros(8, 16, dtype=torch.long)
    return Private(), (ids, ids)


def shrunk_preset() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    values = {**read_preset("qwen3-8b").values, **sizes, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 256}
    values.pop("layer_types", None)
    return load_model({"hf_config": {**values, "max_window_layers": 2}}).module


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"mesh": "dp=2,tp=2", "micro_batches": 2}],
    ids=["all meshes", "one mesh"],
)
def test_private_module_gets_the_plan_that_it_gets_here(server: Server, options: dict[str, Any]) -> None:
    module, inputs = private()
    said: list[ProgressEvent] = []
    remote = RemoteShardingPlanner(server.url, example_inputs=inputs, progress=said.append, **JOB, **options)
    found = remote.build_plan(module)
    assert without_timings(found) == without_timings(build_plan(module, example_inputs=inputs, **JOB, **options))
    assert said[:2] == [TRACING, ASKING_SERVER]


@pytest.mark.parametrize(("planner", "fused_ops"), [("ilp", False), ("ilp", True), ("tensor-parallel", False)])
def test_shrunk_preset_gets_the_plan_that_it_gets_here(server: Server, planner: str, fused_ops: bool) -> None:
    module = shrunk_preset()
    options: dict[str, Any] = {**JOB, "mesh": "dp=2,tp=2", "batch": 8, "seq": 32, "ac": "none", "planner": planner}
    options["fused_ops"] = fused_ops
    found = RemoteShardingPlanner(server.url, **options).build_plan(module)
    assert without_timings(found) == without_timings(build_plan(module, **options))


def test_same_graph_is_planned_once(server: Server) -> None:
    module, inputs = private()
    request = {**JOB, "model": {"graph": write_graph(trace_module(module, example_inputs=inputs, dtype="fp32"))}}
    request |= {"mesh": "dp=2,tp=2", "ac": "none", "planner": "data-parallel"}
    first = httpx2.post(f"{server.url}/v1/plans", json=request, timeout=60).json()
    ended = server.until_ended(first["id"])
    assert ended["status"] == "succeeded", ended["error"]
    second = httpx2.post(f"{server.url}/v1/plans", json=request, timeout=60)
    assert second.status_code == 200
    assert second.json() == ended


def graph_of(**changes: Any) -> dict[str, Any]:
    module, inputs = private()
    document: dict[str, Any] = json.loads(
        text_of(write_graph(trace_module(module, example_inputs=inputs, dtype="fp32")))
    )
    return {**document, **changes}


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ({}, "shardplan-graph"),
        ({"format": "shardplan-graph", "zlib": "AAAA"}, "cannot be read"),
        ({"format": "shardplan-graph", "pickle": "gASV"}, "the field is missing"),
    ],
)
def test_graph_that_is_none_is_422_at_once(server: Server, graph: dict[str, Any], said: str) -> None:
    answer = httpx2.post(f"{server.url}/v1/plans", json={**JOB, "model": {"graph": graph}}, timeout=60)
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:shardplan:graph-format-error"
    assert said in answer.json()["detail"]


def test_graph_of_another_job_is_422_at_once(server: Server) -> None:
    answer = httpx2.post(
        f"{server.url}/v1/plans", json={**JOB, "dtype": "bf16", "model": {"graph": graph_of()}}, timeout=60
    )
    assert answer.status_code == 422
    assert "traced in fp32" in answer.json()["detail"]


def test_graph_whose_ops_do_not_run_fails_with_the_op(server: Server) -> None:
    graph = graph_of()
    graph["ops"] = copy.deepcopy(graph["ops"])
    mean = next(op for op in graph["ops"] if op["op"] == "aten.embedding.default")
    mean["args"] = mean["args"][::-1]
    mean["crossings"] = mean["crossings"][::-1]
    answer = httpx2.post(f"{server.url}/v1/plans", json={**JOB, "model": {"graph": graph}}, timeout=60)
    assert answer.status_code == 202, answer.text
    ended = server.until_ended(answer.json()["id"])
    assert ended["status"] == "failed"
    assert ended["error"]["status"] == 422
    assert "op embedding" in ended["error"]["detail"]
    assert "Traceback" not in json.dumps(ended)


def test_server_names_what_it_refuses(server: Server) -> None:
    module, inputs = private()
    with pytest.raises(RemotePlanningError, match="unknown device 'toi'"):
        RemoteShardingPlanner(server.url, example_inputs=inputs, cluster="1x4xtoi").build_plan(module)


def test_a_private_module_is_compared_as_it_is_here(server: Server) -> None:
    module, inputs = private()
    said: list[ProgressEvent] = []
    options: dict[str, Any] = {**JOB, "micro_batches": 1}
    remote = RemoteShardingPlanner(server.url, example_inputs=inputs, progress=said.append, **options)
    rows = remote.compare(module, "sweep", devices=[1, 2])
    traced = trace_module(module, example_inputs=inputs, micro_batches=1, dtype="fp32")
    sizes = sweep(traced, counts=[1, 2], **options)
    assert [(row.cluster, row.devices) for row in rows] == [("1x1xtoy", 1), ("1x2xtoy", 2)]
    for row, size in zip(rows, sizes, strict=True):
        assert row.plan is not None
        assert size.plan is not None
        assert json.loads(without_timings(row.plan)) == json.loads(without_timings(size.plan))
    assert sum(row.is_best for row in rows) == 1
    assert {event.subject for event in said if isinstance(event, SweepProgress)} == {"1x1xtoy", "1x2xtoy"}


def test_batches_are_compared_for_the_config_of_a_module(server: Server) -> None:
    remote = RemoteShardingPlanner(server.url, **JOB, mesh="dp=4", seq=16)
    rows = remote.compare(shrunk_preset(), "batches", most=2)
    assert [row.batch for row in rows] == [1, 2]
    assert all(row.plan is not None and row.plan.job.phase == "decode" for row in rows)
    graph = {"graph": graph_of()}
    body = {"kind": "batches", "request": {"model": graph, "cluster": "1x4xtoy", "dtype": "fp32"}}
    answer = httpx2.post(f"{server.url}/v1/comparisons", json=body, timeout=60)
    assert (answer.status_code, "not compared for a graph" in answer.json()["detail"]) == (422, True)


def test_a_plan_of_a_graph_is_explained_from_the_config_of_its_module(server: Server) -> None:
    module = shrunk_preset()
    remote = RemoteShardingPlanner(
        server.url, **JOB, mesh="dp=2,tp=2", batch=8, seq=32, ac="none", micro_batches=1, planner="data-parallel"
    )
    plan = remote.build_plan(module)
    found = remote.explain(module, plan, "model.norm.weight")
    assert json.dumps(found) == json.dumps(explanation_dict(explain(module, plan, "model.norm.weight")))


def test_a_comparison_that_is_refused_says_why(server: Server) -> None:
    remote = RemoteShardingPlanner(server.url, model="gpt2", cluster="1x4xtoy", mesh="dp=4", batch=8, seq=8)
    with pytest.raises(RemotePlanningError, match="mesh is 'dp=4': alternatives does not take it"):
        remote.compare(nn.Identity(), "alternatives")
