"""The example that shows that the sharded numbers are the unsharded model's; `tests/docs` trains with it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from api.requests.model_registry import load_model
from planner import ShardingPlan, build_plan

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_example", EXAMPLES / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plan() -> ShardingPlan:
    source = load_model(str(EXAMPLES / "tiny_llama.json"), seq=32)
    return build_plan(
        source.module, cluster="1x4xtoy", mesh="dp=2,tp=2", batch=8, seq=32, micro_batches=2, ac="none", dtype="fp32"
    )


def test_another_number_of_processes_is_refused(
    train: ModuleType,
    plan: ShardingPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    monkeypatch.setattr(sys, "argv", ["train.py", str(file)])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main() == 2
    message = capsys.readouterr().err
    assert "is for the mesh dp=2,tp=2, 4 processes, but 2 were started" in message
    assert "torchrun --nproc-per-node 4" in message


def test_one_process_on_its_own_is_refused(
    train: ModuleType, plan: ShardingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "torchrun --nproc-per-node 4" in train.why_not(plan, "plan.json")


def test_something_else_than_a_plan_is_refused(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", str(EXAMPLES / "tiny_llama.json")])
    assert train.main() == 2
    assert "is not a plan" in capsys.readouterr().err


def test_a_wrong_gradient_is_seen(train: ModuleType) -> None:
    model, reference = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    model.weight.grad, reference.weight.grad = torch.tensor([[1.0, 4.5]]), torch.tensor([[1.0, 5.0]])
    assert train.gradient_difference(model, reference) == pytest.approx(0.1)
