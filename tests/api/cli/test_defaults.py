"""`shardplan plan MODEL` with nothing else: what is assumed is printed and in the plan. Other commands still ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.defaults import with_assumed
from api.cli.main import app

NOTHING: dict[str, Any] = {"cluster": None, "batch": None, "seq": None, "mesh": None, "micro_batches": None}


@pytest.fixture(autouse=True)
def four_toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDPLAN_CLUSTER", "1x4xtoy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def fields(lines: tuple[str, ...]) -> list[str]:
    return [line.split(":")[0] for line in lines]


def test_a_model_is_planned_with_nothing_else(tmp_path: Path, tiny_llama: dict[str, Any]) -> None:
    Path("config.json").write_text(json.dumps(tiny_llama | {"max_position_embeddings": 32}))
    printed = CliRunner().invoke(app, ["plan", "config.json", "-o", "plan.json"])
    assert printed.exit_code == 0, printed.output
    lines = printed.stdout.splitlines()
    assert "assumed: cluster 1x4xtoy: the environment's SHARDPLAN_CLUSTER" in lines
    assert "assumed: batch 4: one sample for each device" in lines
    assert "assumed: seq 32: the model's context" in lines
    plan = json.loads(Path("plan.json").read_text())
    assert (plan["job"]["batch"], plan["job"]["seq"], len(plan["assumed"])) == (4, 32, 3)
    # From the cache of plans too, and with what is given not assumed.
    again = CliRunner().invoke(app, ["plan", "config.json", "--batch", "4", "--seq", "32", "--json"])
    assert fields(tuple(json.loads(again.stdout)["assumed"])) == ["cluster 1x4xtoy"]
    assert "planned before" in again.stderr


def test_images_have_no_sequences() -> None:
    Path("config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1}))
    full, assumed = with_assumed("config.json", NOTHING)
    assert full["seq"] is None
    assert fields(assumed) == ["cluster 1x4xtoy", "batch 4"]


def test_a_factory_says_its_inputs_or_needs_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own_factories.py").write_text(
        "import torch\n"
        "def fixed():\n    return torch.nn.Linear(4, 4), (torch.zeros(8, 4),)\n"
        "def sized(batch):\n    return torch.nn.Linear(4, 4), (torch.zeros(batch, 4),)\n"
    )
    full, assumed = with_assumed("own_factories:fixed", NOTHING)
    assert (full["batch"], fields(assumed)) == (None, ["cluster 1x4xtoy"])
    full, assumed = with_assumed("own_factories:sized", NOTHING)
    assert (full["batch"], fields(assumed)) == (4, ["cluster 1x4xtoy", "batch 4"])


def test_what_is_given_is_kept() -> None:
    given = NOTHING | {"cluster": "2x8xtoy", "batch": 3, "seq": 16}
    assert with_assumed("gpt2", given) == (given, ())
