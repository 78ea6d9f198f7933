"""What can be named, and mistakes in names: answered before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from api.cli.main import app
from api.requests.model_configs import preset_names, preset_summary
from api.requests.model_registry import load_model
from cost_model.hardware.devices import device_names, find_device

LATE = {"torch", "transformers"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def modules_after(*arguments: str) -> tuple[int, str, set[str]]:
    """Return exit code, standard error, and which of ``LATE`` a command imported, in a process of its own."""
    code = (
        "import sys; from typer.testing import CliRunner; from api.cli.main import app; "
        "done = CliRunner().invoke(app, sys.argv[1:]); "
        f"print(done.exit_code, sorted({LATE} & set(sys.modules))); print(done.stderr, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    exit_code, _, late = done.stdout.strip().partition(" ")
    return int(exit_code), done.stderr, set(json.loads(late.replace("'", '"')))


def test_versions() -> None:
    said = run("--version")
    assert said.exit_code == 0
    assert said.stdout == f"shardplan {metadata.version('shardplan')}, torch {metadata.version('torch')}\n"


def test_models_lists_every_preset() -> None:
    lines = run("models").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(preset_names())
    llama = next(line for line in lines if line.startswith("llama-3.1-8b"))
    assert llama.split() == ["llama-3.1-8b", "8.03", "B", "32", "4,096", "131,072"]
    assert all(len(line) <= 80 for line in lines)
    rows = json.loads(run("models", "--json").stdout)
    assert [row["name"] for row in rows] == list(preset_names())
    assert all(set(row) == {"name", "model_type", "parameters", "layers", "hidden", "context"} for row in rows)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_the_parameters_that_it_states(name: str) -> None:
    assert sum(p.numel() for p in load_model(name).module.parameters()) == preset_summary(name)["parameters"]


def test_devices_lists_the_catalogue() -> None:
    lines = run("devices").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(device_names())
    assert all(len(line) <= 80 for line in lines)
    rows = json.loads(run("devices", "--json").stdout)
    assert [row["memory_bytes"] for row in rows] == [find_device(name).memory_bytes for name in device_names()]


JOB = ["--cluster", "1x8xh100-sxm-80gb", "--batch", "8", "--seq", "1024"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "llama-3.1-8bb", *JOB], "Did you mean llama-3.1-8b"),
        (["plan", "gpt2", "--cluster", "1x8xh100-smx-80gb"], "did you mean h100-sxm-80gb"),
        (["plan", "gpt2", "--cluster", "4*8 H100"], "did you mean 4x8xh100-sxm-80gb"),
        (["plan", "gpt2", "--cluster", "h100x8"], "did you mean 8xh100-sxm-80gb"),
        (["plan", "gpt2", *JOB, "--planner", "fully-shard"], "Did you mean fully-sharded"),
        (["plan", "gpt2", *JOB, "--optimizer", "adamv"], "Did you mean adam or adamw"),
        (["plan", "gpt2", *JOB, "--optimiser", "adamw"], "--optimizer"),
        (["sweep", "llama-3.1-8bb", *JOB], "Did you mean llama-3.1-8b"),
        (["estimate", "llama-3.1-8bb", "fully-sharded", *JOB], "Did you mean llama-3.1-8b"),
        (["verify", "llama-3.1-8bb", "plan.json"], "Did you mean llama-3.1-8b"),
        (["models"], ""),
        (["devices"], ""),
    ],
)
def test_mistakes_in_names_are_found_before_torch_is_imported(arguments: list[str], said: str) -> None:
    exit_code, stderr, late = modules_after(*arguments)
    assert exit_code == (2 if said else 0), stderr
    assert said in stderr
    assert not late


@pytest.mark.parametrize(
    ("model", "meant"), [("mymod.py", "mymod:factory"), ("mymod.py:build", "mymod:build"), ("mymod", "mymod:factory")]
)
def test_a_python_file_is_named_as_a_module(
    model: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mymod.py").write_text("def build(): ...\n")
    monkeypatch.chdir(tmp_path)
    done = run("plan", model, *JOB)
    assert done.exit_code == 2
    assert f"Write {meant}," in done.stderr
