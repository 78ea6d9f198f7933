"""A sharded module runs eagerly under ``torch.compile``, and says so, on four real processes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.executor_cases import data_parallel, loss_of, make_batch, make_model
from support.gloo import run_on_gloo
from support.training_loops import whole

from executor import device_mesh_for, local_batch, shard_module
from planner.errors import PlanMismatchError


def losses_of(call: Any, model: torch.nn.Module, local: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(2):
        loss = loss_of(call(**local(make_batch("mlp", step))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss).item())
    return losses


def run(rank: int) -> dict[str, Any]:
    plan = data_parallel("mlp").plan
    mesh = device_mesh_for(plan)
    results: dict[str, Any] = {}

    def sharded() -> torch.nn.Module:
        return shard_module(make_model("mlp"), mesh, plan)

    def local(batch: Any) -> Any:
        return local_batch(batch, mesh, plan)

    for name in ("torch.compile(model)", "model.compile()"):
        model = sharded()
        if name == "model.compile()":
            model.compile(backend="aot_eager")
        call = model if name == "model.compile()" else torch.compile(model, backend="aot_eager")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results[name] = losses_of(call, model, local)
        results[f"{name} said"] = [str(warning.message) for warning in caught]
    model = sharded()
    with pytest.raises(Exception, match="shardplan") as whole_graph:
        torch.compile(model, backend="eager", fullgraph=True)(**local(make_batch("mlp")))
    results["fullgraph"] = str(whole_graph.value)
    model.fc1.compile(backend="eager")
    with pytest.raises(PlanMismatchError) as part:
        model(**local(make_batch("mlp")))
    results["part"] = str(part.value)
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    results: dict[str, Any] = run_on_gloo(run, 4)[0]
    return results


@pytest.mark.parametrize("name", ["torch.compile(model)", "model.compile()"])
def test_a_compiled_module_runs_eagerly_and_says_so(results: dict[str, Any], name: str) -> None:
    model = make_model("mlp")
    assert results[name] == pytest.approx(losses_of(model, model, lambda batch: batch), rel=1e-5)
    assert any("techniques='fused-ops'" in text for text in results[f"{name} said"])


def test_a_whole_graph_is_refused_with_the_reason(results: dict[str, Any]) -> None:
    assert "a module sharded by shardplan runs eagerly" in results["fullgraph"]


def test_a_compiled_part_is_refused(results: dict[str, Any]) -> None:
    assert "fc1" in results["part"]
    assert ".compile()" in results["part"]
