"""The command line as a person or a script meets it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from api.cli import app
from planner.plan import ShardingPlan

TINY = ["--cluster", "1x4xtoy", "--mesh", "dp=2,tp=2", "--batch", "8", "--seq", "32", "--dtype", "fp32"]
QUICK = ["--micro-batches", "1", "--ac", "none"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tmp_path: Path, tiny_llama: dict[str, Any]) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_llama))
    return str(file)


@pytest.fixture
def plan_file(tmp_path: Path, hand_written_plan: ShardingPlan) -> str:
    file = tmp_path / "hand.json"
    hand_written_plan.save(file)
    return str(file)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command, as a shell would."""
    program = Path(sys.executable).with_name("shardplan")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=300)


def test_help_is_at_once_and_imports_neither_torch_nor_fastapi() -> None:
    took_s = []
    for _ in range(3):
        start = time.perf_counter()
        assert command("--help").returncode == 0
        took_s.append(time.perf_counter() - start)
    assert min(took_s) < 0.3
    code = "import sys, api.cli; assert not {'torch', 'fastapi', 'pydantic', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plan_has_every_option_by_name() -> None:
    said = run("plan", "--help").output
    job = "--cluster --mesh --batch --seq --micro-batches --ac --memory-gb --optimizer --dtype --planner"
    options = f"{job} --output --json --no-cache"
    assert set(options.split()) <= set(re.findall(r"--[a-z-]+", said))
    assert "-o" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "lama-3.1-8b", *TINY], "Did you mean llama-3.1-8b"),
        (["plan", "nowhere/config.json", *TINY], "nowhere/config.json"),
        (["plan", "gpt2", "--cluster", "2x8xh100"], "did you mean h100-sxm-80gb"),
        (["plan", "gpt2", "--cluster", "many"], "4x8xh100-sxm-80gb"),
        (["plan", "gpt2", "--cluster", "absent.yaml"], "absent.yaml"),
        (["plan", "gpt2", "--cluster", "2x8xh100-sxm-80gb", "--mesh", "dp=3,tp=2"], "multiply to 16"),
        (["plan", "gpt2", "--cluster", "2x8xh100-sxm-80gb", "--mesh", "2x8"], "dp=2,tp=8"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--batch", "8", "--micro-batches", "3"], "divides 8"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--batch", "0"], "--batch is 0"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--memory-gb", "-3"], "--memory-gb is -3"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--ac", "some"], "--ac is 'some'"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--dtype", "int3"], "--dtype is 'int3'"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--optimizer", "magic"], "adamw"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--planner", "random"], "--planner is 'random'"),
        (["plan", "gpt2", "--cluster", "1x4xtoy"], "batch is missing"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--batch", "8"], "seq is missing"),
        (["plan", "gpt2", *TINY[:-4], "--seq", "4096"], "1024 learned positions"),
        (["plan", "gpt2", *TINY, "-o", "/nowhere/plan.json"], "there is no folder /nowhere"),
        (["plan", "os:getpid", *TINY], "returned a int"),
        (["show", "absent.json"], "absent.json"),
        (["show", "pyproject.toml"], "not a plan"),
        (["estimate", "gpt2"], "after MODEL"),
        (["estimate", "gpt2", "fully-sharded", "--planner", "ilp"], "more than one"),
        (["estimate", "gpt2", "fully-sharded"], "--cluster is missing"),
        (["estimate", "gpt2", "nonsense", *TINY], "--planner is 'nonsense'"),
        (["estimate", "gpt2", "plan.json", "--batch", "8"], "--batch cannot be given with a plan file"),
        (["verify", "gpt2", "absent.json"], "absent.json"),
        (["serve", "--port", "99999"], "port"),
    ],
)
def test_bad_input_says_what_is_wrong_with_exit_code_2(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)


def test_port_that_is_taken_is_bad_input(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = command("serve", "--port", str(taken.getsockname()[1]), "--data-dir", str(tmp_path))
    assert result.returncode == 2
    assert "cannot listen on 127.0.0.1" in result.stderr


@pytest.mark.parametrize("keep", [0, 1, 100, 900])
def test_truncated_plan_file_is_bad_input(plan_file: str, keep: int) -> None:
    file = Path(plan_file)
    file.write_bytes(file.read_bytes()[:keep])
    result = run("show", plan_file)
    assert result.exit_code == 2
    assert plan_file in result.stderr


def test_real_process_shows_no_traceback_and_json_errors_are_problem_details() -> None:
    done = command("plan", "gpt2", "--cluster", "2x8xh100", "--json")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"]["title"] == "The cluster cannot be used"


def test_show_tells_axes_memory_collectives_and_gap(plan_file: str) -> None:
    said = run("show", plan_file).stdout
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert any(line.startswith("dp 2 FSDP 3 parameter entries stored in pieces") for line in lines)
    assert any(line.startswith("tp 2 TP+SP 2 parameter entries stored and used in pieces") for line in lines)
    for expected in (
        "parameters 10.00 GB",
        "peak 40.00 GB",
        "whole step 500.00 ms",
        "all-gather dp forward 32 2.00 MB 2.00 ms",
        "Note: a note for people",
    ):
        assert expected in lines
    assert "at most 0.02% from the best" in said
    assert "full for model.layers.*" in said


def test_show_json_is_the_plan(plan_file: str, hand_written_plan: ShardingPlan) -> None:
    assert ShardingPlan.from_dict(json.loads(run("show", plan_file, "--json").stdout)) == hand_written_plan


def test_plan_writes_the_file_that_it_prints(config: str, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    result = run("plan", config, *TINY, *QUICK, "-o", str(output), "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout == output.read_text()
    data = json.loads(result.stdout)
    assert data["estimate"]["step_time_s"] > 0
    assert {"trace_s", "solve_s"} <= set(data["timings"])
    assert data["solver"]["gap"] <= 1e-3


def test_same_plan_comes_from_the_cache_unless_told_otherwise(config: str) -> None:
    def plan(*more: str) -> tuple[dict[str, Any], str]:
        result = run("plan", config, *TINY, *QUICK, "--json", *more)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout), result.stderr

    first, _ = plan()
    again, said = plan()
    assert again == first
    assert "--no-cache" in said
    fresh, said = plan("--no-cache")
    assert fresh["timings"] != first["timings"]
    assert said == ""


def test_impossible_is_exit_code_3_and_names_the_least(config: str) -> None:
    result = run("plan", config, *TINY, *QUICK, "--memory-gb", "0.000001", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["least_bytes"] > 1000
    assert "the least that would do" in result.stderr


def test_estimate_of_a_plan_file_is_its_own_price(config: str, tmp_path: Path) -> None:
    output = str(tmp_path / "plan.json")
    planned = json.loads(run("plan", config, *TINY, *QUICK, "-o", output, "--json").stdout)
    result = run("estimate", config, output, "--json")
    assert result.exit_code == 0, result.output
    priced = json.loads(result.stdout)
    assert priced["estimate"]["step_time_s"] == pytest.approx(planned["estimate"]["step_time_s"], rel=1e-9)
    assert priced["estimate"]["collectives"] == planned["estimate"]["collectives"]


@pytest.mark.parametrize("baseline", ["data-parallel", "fully-sharded", "tensor-parallel"])
def test_estimate_of_a_baseline_by_name(config: str, baseline: str) -> None:
    result = run("estimate", config, baseline, *TINY, *QUICK, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["estimate"]["step_time_s"] > 0


def test_verify_agrees_with_a_plan_and_objects_to_an_edited_one(config: str, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    assert run("plan", config, *TINY, *QUICK, "-o", str(output)).exit_code == 0
    agreed = run("verify", config, str(output), "--json")
    assert agreed.exit_code == 0, agreed.output
    assert json.loads(agreed.stdout)["equal"] is True

    data = json.loads(output.read_text())
    data["estimate"]["collectives"][0]["count"] += 1
    output.write_text(json.dumps(data))
    differs = run("verify", config, str(output), "--json")
    assert differs.exit_code == 1
    report = json.loads(differs.stdout)
    assert report["equal"] is False
    assert report["differences"]


def test_plan_of_another_model_is_refused(config: str, tmp_path: Path) -> None:
    output = str(tmp_path / "plan.json")
    assert run("plan", config, *TINY, *QUICK, "-o", output).exit_code == 0
    result = run("verify", "gpt2", output)
    assert result.exit_code == 2, result.output
    assert "model" in result.stderr


def test_batch_that_data_parallelism_cannot_divide_is_bad_input(config: str) -> None:
    cluster = ["--cluster", "1x4xtoy", "--mesh", "dp=4", "--batch", "6", "--seq", "32", "--dtype", "fp32"]
    result = run("plan", config, *cluster, *QUICK, "--planner", "data-parallel")
    assert result.exit_code == 2, result.output
