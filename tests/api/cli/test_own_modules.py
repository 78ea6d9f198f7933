"""The command line with modules of the caller's own, by the name of the function that makes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from api.cli.main import app
from planner import PlanningSession

FACTORY = """
import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))

    def forward(self, x):
        return self.body(x).square().mean()


def mlp(batch):
    return Regressor(), (torch.zeros(batch, 256),)
"""

UNRUNNABLE = """
import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Layer(nn.Linear):
    def forward(self, x):
        if isinstance(self.weight, DTensor) or isinstance(x, DTensor):
            return super().forward(x).view(3)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer(256, 1024)

    def forward(self, x):
        return self.layer(x).square().mean()


def model(batch):
    return Model(), (torch.zeros(batch, 256),)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_plan_that_does_not_run_has_exit_code_4_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "unrunnable.py").write_text(UNRUNNABLE)
    from unrunnable import model  # type: ignore[import-not-found]

    job = ["--cluster", "1x4xtoy", "--mesh", "dp=2,tp=2", "--batch", "64", "--dtype", "fp32"]
    job += ["--micro-batches", "1", "--ac", "none"]
    refused = run("plan", "unrunnable:model", *job, "-o", "plan.json")
    assert refused.exit_code == 4, refused.output
    assert not (tmp_path / "plan.json").exists()
    module, inputs = model(64)
    options = {"cluster": "1x4xtoy", "dtype": "fp32", "micro_batches": 1, "ac": "none"}
    PlanningSession(module, example_inputs=inputs, **options).plan(mesh="dp=2,tp=2").save("plan.json")
    result = run("verify", "unrunnable:model", "plan.json")
    assert result.exit_code == 4, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("shardplan: the plan does not run: layer (Layer) fails, at aten.")
    as_json = run("verify", "unrunnable:model", "plan.json", "--json")
    assert as_json.exit_code == 4
    problem = json.loads(as_json.stdout)["error"]
    assert problem["type"] == "urn:shardplan:run-error"
    assert (problem["status"], problem["module"]) == (422, "layer")


def test_function_that_returns_a_module_is_planned_and_verified(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text(FACTORY)
    cluster = ["--cluster", "1x4xh100-sxm-80gb", "--mesh", "dp=4", "--batch", "64"]
    made = run("plan", "my_models:mlp", *cluster, "--micro-batches", "2", "-o", "plan.json", "--json")
    assert made.exit_code == 0, made.output
    data = json.loads(made.stdout)
    assert (data["job"]["dtype"], data["job"]["batch"], data["micro_batches"]) == ("bf16", 64, 2)
    verified = run("verify", "my_models:mlp", "plan.json")
    assert verified.exit_code == 0, verified.output
    assert verified.stdout.startswith("Verified")
