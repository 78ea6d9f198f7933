"""`shardplan check`, `export` and `plan --for`, as a person and as a program call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.main import app

MEGATRON = (
    "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 --seq-length 1024 --bf16 "
    "--use-distributed-optimizer"
)
CLUSTER = ("--cluster", "1x8xa100-sxm-80gb")


def run(*command: str, text: str | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(command), input=text)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    file = folder / "plan.json"
    command = ["plan", "examples/tiny_llama.json", "--cluster", "1x4xtoy", "--batch", "8", "--seq", "32"]
    code, _, errors = run(*command, "--for", "torchtitan", "--dtype", "bf16", "-o", str(file), "--no-cache")
    assert code == 0, errors
    return file


def test_check_of_standard_input(tmp_path: Path) -> None:
    code, text, _ = run("check", "gpt2", "-", *CLUSTER, "--quick", text=MEGATRON)
    assert code == 0
    assert "launched with Megatron-LM" in text
    assert "legal          yes" in text
    file = tmp_path / "args.sh"
    file.write_text(MEGATRON)
    code, text, _ = run("check", "gpt2", str(file), *CLUSTER, "--quick", "--json")
    found = json.loads(text)
    assert (code, found["legal"], found["fits"]) == (0, True, True)
    assert found["changes"]


def test_exit_codes() -> None:
    code, text, _ = run("check", "gpt2", "-", *CLUSTER, "--quick", text=MEGATRON.replace("size 2", "size 5", 1))
    assert code == 2
    assert "--tensor-model-parallel-size 5 does not divide 12 heads (1, 2 or 4 would do" in " ".join(text.split())
    large = MEGATRON.replace("--seq-length 1024", "--seq-length 8192")
    code, text, _ = run("check", "llama-3.1-405b", "-", *CLUSTER, "--quick", text=large)
    assert code == 3
    assert "are missing on each device" in text


def test_what_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    code, _, errors = run("check", "gpt2", str(tmp_path / "none.yaml"), *CLUSTER)
    assert code == 2
    assert "none.yaml cannot be read: No such file or directory." in errors
    code, _, errors = run("check", "gpt2", "-", *CLUSTER, "--from", "megatrn", text=MEGATRON)
    assert code == 2
    assert "Did you mean megatron" in errors


def test_a_plan_for_a_framework_is_exported_in_full(plan: Path, tmp_path: Path) -> None:
    output = tmp_path / "run.sh"
    code, text, errors = run("export", str(plan), "--to", "torchtitan", "-o", str(output))
    assert code == 0, errors
    assert text == ""
    assert "Nothing of the plan is lost." in errors
    assert "torchtitan 0.3.0" in output.read_text()
    code, text, _ = run("export", str(plan), "--to", "torchtitan")
    assert text == output.read_text()
    code, text, _ = run("export", str(plan), "--to", "deepspeed", "--json")
    assert code == 0
    assert json.loads(text)["file"] == "ds_config.json"


def test_for_and_planner_exclude_each_other() -> None:
    command = ["plan", "gpt2", "--cluster", "1x4xtoy", "--batch", "8", "--seq", "8"]
    code, _, errors = run(*command, "--for", "torchtitan", "--planner", "fsdp")
    assert code == 2
    assert "--for torchtitan chooses the planner, and --planner is fsdp" in errors
    code, _, errors = run(*command, "--for", "jax")
    assert code == 2
    assert "there is no framework 'jax'" in errors
