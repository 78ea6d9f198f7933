"""Pipelines as they are asked for, shown and refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.small_models import TINY_LLAMA, TINY_REQUEST
from typer.testing import CliRunner, Result

from api.cli.main import app
from api.requests.plan_request import fingerprint, plan_request
from api.requests.schemas import PlanRequest
from planner.plan.sharding_plan import ShardingPlan

SLOW: dict[str, Any] = {
    "nodes": 2,
    "devices_per_node": 1,
    "device": "toy",
    "inter_node": {"bandwidth_bytes_per_s": 1e7},
}
REQUEST = {**TINY_REQUEST, "cluster": SLOW, "mesh": None, "micro_batches": 8}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a client gets that asks for plans of any kind."""
    plan = plan_request(PlanRequest(**REQUEST, executable_only=False), allow_local=False)
    assert plan.pipeline is not None
    file = tmp_path_factory.mktemp("pipeline") / "plan.json"
    plan.save(file)
    return file


def test_pipelines_are_for_those_who_ask() -> None:
    request = PlanRequest(**REQUEST)
    assert request.executable_only
    assert plan_request(request, allow_local=False).pipeline is None
    asked = PlanRequest(**REQUEST, executable_only=False)
    assert fingerprint(asked, allow_local=False) != fingerprint(request, allow_local=False)


def test_the_command_line_has_both_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PlanRequest] = []

    def plan_of(request: PlanRequest, **options: Any) -> ShardingPlan:
        seen.append(request)
        return ShardingPlan.from_dict({"format_version": 1, "mesh": {"names": ["dp"], "shape": [1], "device": "cpu"}})

    monkeypatch.setattr("api.cli.main.plan_of", plan_of)
    for switch in ([], ["--executable-only"], ["--no-executable-only"]):
        assert run("plan", "gpt2", "--cluster", "1x2xtoy", *switch).exit_code == 0
    assert [request.executable_only for request in seen] == [True, True, False]


def test_show_names_the_stages(plan_file: Path) -> None:
    shown = run("show", str(plan_file), "--details").output
    assert "2 stages, 1f1b" in shown
    assert "model.embed_tokens, model.layers.0" in shown
    assert "pipeline bubble" in shown
    assert "send-recv" in shown


def test_show_and_diff_say_that_stages_are_interleaved(plan_file: Path, tmp_path: Path) -> None:
    plan = ShardingPlan.load(plan_file)
    assert plan.pipeline is not None
    chunks = dataclasses.replace(plan.pipeline, schedule="interleaved", chunks=3)
    file = tmp_path / "interleaved.json"
    dataclasses.replace(plan, pipeline=chunks).save(file)
    assert "2 stages, interleaved, 3 chunks each" in run("show", str(file)).output
    shown = run("diff", str(plan_file), str(file))
    assert "chunks" in shown.output
    assert "interleaved" in shown.output


@pytest.mark.parametrize("command", ["estimate", "verify", "explain"])
def test_what_would_run_or_price_it_refuses(command: str, plan_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_LLAMA))
    refused = run(command, str(config), str(plan_file), *(["lm_head.weight"] if command == "explain" else []))
    assert refused.exit_code == 2
    assert "pipeline of 2 stages" in refused.output
    assert "--executable-only" in refused.output
