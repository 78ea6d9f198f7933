"""The command line as a person or a script meets it."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.small_models import TINY_LLAMA
from typer.testing import CliRunner, Result

from api.cli.main import app
from planner.plan.sharding_plan import CollectiveEstimate, ShardingPlan

TINY = ["--cluster", "1x4xtoy", "--mesh", "dp=2,tp=2", "--batch", "8", "--seq", "32", "--dtype", "fp32"]
QUICK = ["--micro-batches", "1", "--ac", "none"]
EXACT = ["--tolerance", "0"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tmp_path: Path, tiny_llama: dict[str, Any]) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_llama))
    return str(file)


@dataclass(frozen=True)
class Planned:
    """What `shardplan plan` left behind."""

    config: str
    plan: Path
    cache: Path
    printed: str


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """A plan that was made once, for all tests that only need one."""
    folder = tmp_path_factory.mktemp("planned")
    config, plan, cache = folder / "config.json", folder / "plan.json", folder / "cache"
    config.write_text(json.dumps(TINY_LLAMA))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        result = run("plan", str(config), *TINY, *QUICK, *EXACT, "-o", str(plan), "--json")
    assert result.exit_code == 0, result.output
    return Planned(config=str(config), plan=plan, cache=cache, printed=result.stdout)


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


def test_help_imports_nothing_that_takes_long() -> None:
    assert command("--help").returncode == 0
    slow = {"torch", "fastapi", "pydantic", "transformers", "networkx", "numpy", "pulp"}
    code = f"import sys, api.cli.main; assert not {slow} & set(sys.modules), set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plan_has_every_option_by_name() -> None:
    said = run("plan", "--help").output
    job = "--cluster --mesh --batch --seq --micro-batches --ac --memory-gb --optimizer --dtype --reduce-dtype --planner"
    options = f"{job} --techniques --output --json --no-cache"
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
        (["plan", "gpt2", "--cluster", "2x8xh100-sxm-80gb", "--mesh", "dp=3,tp=2"], "product is 16"),
        (["plan", "gpt2", "--cluster", "2x8xh100-sxm-80gb", "--mesh", "2x8"], "dp=2,tp=8"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--batch", "8", "--micro-batches", "3"], "divides 8"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--batch", "0"], "--batch is 0"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--memory-gb", "-3"], "--memory-gb is -3"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--ac", "some"], "--ac is 'some'"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--dtype", "int3"], "'int3' is not one of 'bf16'"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--reduce-dtype", "fp8"], "'fp8' is not one of"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--optimizer", "magic"], "adamw"),
        (["plan", "gpt2", "--cluster", "1x4xtoy", "--planner", "random"], "there is no planner 'random'"),
        (["alternatives", "gpt2", "--cluster", "1x4xtoy"], "batch and seq are missing"),
        (["alternatives", "gpt2", "--cluster", "1x4xtoy", "--batch", "8"], "seq is missing"),
        (["plan", "gpt2", *TINY[:-4], "--seq", "4096"], "1024 learned positions"),
        (["plan", "gpt2", *TINY, "-o", "/nowhere/plan.json"], "there is no folder /nowhere"),
        (["plan", "os:getpid", *TINY], "returned a int"),
        (["show", "absent.json"], "absent.json"),
        (["show", "pyproject.toml"], "not a plan"),
        (["estimate", "gpt2"], "after MODEL"),
        (["estimate", "gpt2", "fully-sharded", "--planner", "ilp"], "more than one"),
        (["estimate", "gpt2", "fully-sharded"], "--cluster is missing"),
        (["estimate", "gpt2", "nonsense", *TINY], "there is no planner 'nonsense'"),
        (["estimate", "gpt2", "--mesh", "fsdp=8", "--micro-batch", "1"], "--cluster is missing"),
        (["estimate", "gpt2", "--cluster", "8xh100-sxm-80gb", "--mesh", "fsdp=4", "--micro-batch", "1"], "4 ranks"),
        (["estimate", "gpt2", "--cluster", "8xh100-sxm-80gb", "--mesh", "fsdp=8,xp=2"], "unknown axis 'xp'"),
        (["estimate", "t5-large", "--cluster", "8xtoy", "--mesh", "fsdp=8"], "Plan it instead"),
        (["estimate", "gpt2", "--mesh", "fsdp=8", "--micro-batches", "2"], "--micro-batches: for plans"),
        (["estimate", "gpt2", "--mesh", "fsdp=8", "--reduce-dtype", "bf16"], "--reduce-dtype: for plans"),
        (["estimate", "gpt2", "--mesh", "fsdp=8", "--micro-batch", "1", "--fused-ops"], "--techniques: for plans"),
        (
            ["estimate", "gpt2", "--mesh", "fsdp=8", "--micro-batch", "1", "--reallgather"],
            "--techniques: for plans",
        ),
        (["calibrate", "-o", "cluster.yaml"], "torchrun"),
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


def test_real_process_prints_a_plan_as_json_and_nothing_else(planned: Planned) -> None:
    """A library that writes to standard output by itself is not seen where Python's is replaced."""
    done = command("plan", planned.config, *TINY, *QUICK, *EXACT, "--no-cache", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"] == json.loads(planned.printed)["plan"]


def test_show_tells_axes_weights_memory_collectives_and_gap(plan_file: str) -> None:
    said = run("show", plan_file, "--details").stdout
    lines = [" ".join(line.split()) for line in said.splitlines()]
    for expected in (
        "dp = 2 shards weights, gradients, optimizer states and the batch (FSDP)",
        "tp = 2 splits heads and hidden dims of every block's weights, and the",
        "model.layers.*: q_proj dp dim 0, tp dim 0 tp dim 0, gathered over dp",
        "model.norm dp dim 0 gathered over dp",
        "parameters 10.0 ##########",
        "memory 40.0 GB of 85.0 GB 53 % free, 80.0 GB allowed",
        "communication 120 ############ 20.0 ms overlapped, 100 ms exposed",
        "all-gather dp forward 32 2.00 MB 2.00 ms",
        "Note: a note for people",
    ):
        assert expected in lines
    assert "512 tokens/s, 128 per GPU" in said
    assert "Optimal within 0.1 %" in said
    assert "full activation checkpointing of model.layers.*" in said


def test_show_adds_up_the_collectives_that_matter_little(hand_written_plan: ShardingPlan, tmp_path: Path) -> None:
    assert hand_written_plan.estimate is not None
    rows = tuple(
        CollectiveEstimate(kind="all_reduce", axis=f"axis{i}", phase="forward", count=2, bytes=1000 * i, time_s=i)
        for i in range(1, 21)
    )
    priced = dataclasses.replace(hand_written_plan.estimate, collectives=rows)
    dataclasses.replace(hand_written_plan, estimate=priced).save(tmp_path / "many.json")
    shown = run("show", str(tmp_path / "many.json"), "--details").stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert sum(line.startswith("all-reduce") for line in lines) == 12
    assert "others (--json) 16 1.00 kB to 8.00 kB 36.0 s" in lines


def test_show_json_is_the_plan(plan_file: str, hand_written_plan: ShardingPlan) -> None:
    assert ShardingPlan.from_dict(json.loads(run("show", plan_file, "--json").stdout)) == hand_written_plan


def test_plan_writes_the_file_that_it_prints(planned: Planned) -> None:
    assert planned.printed == planned.plan.read_text()
    data = json.loads(planned.printed)
    assert set(data) >= {"mesh", "plan", "estimate", "solver", "timings"}
    assert data["estimate"]["step_time_s"] > 0
    assert sum(data["estimate"]["memory"].values()) == data["estimate"]["peak_memory_bytes"]
    assert set(data["estimate"]["collectives"][0]) == {"kind", "axis", "phase", "count", "bytes", "time_s"}
    assert {"trace_s", "solve_s"} <= set(data["timings"])
    assert all(name.endswith("_s") for name in data["timings"])
    assert data["solver"]["status"] == "optimal"
    assert data["solver"]["gap"] <= 1e-3


def test_show_has_a_row_for_each_axis_of_a_real_plan(planned: Planned) -> None:
    said = run("show", str(planned.plan)).stdout
    assert re.search(r"^  dp = 2 +(shards|splits) ", said, re.MULTILINE)
    assert re.search(r"^  tp = 2 +(shards|splits) ", said, re.MULTILINE)
    assert "  optimizer " in said


def test_same_plan_comes_from_the_cache_unless_told_otherwise(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(planned.cache))
    again = run("plan", planned.config, *TINY, *QUICK, *EXACT, "--json")
    assert again.stdout == planned.printed
    assert "--no-cache" in again.stderr
    fresh = run("plan", planned.config, *TINY, *QUICK, *EXACT, "--json", "--no-cache")
    assert fresh.stderr == ""
    first, second = json.loads(planned.printed), json.loads(fresh.stdout)
    assert second.pop("timings") != first.pop("timings")
    del first["solver"]["time_s"], second["solver"]["time_s"]
    assert second == first


def test_impossible_is_exit_code_3_and_names_the_least(config: str) -> None:
    result = run("plan", config, *TINY, *QUICK, "--memory-gb", "0.000001", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["least_bytes"] > 1000
    assert "would do" in result.stderr  # the least, or the least found and a bound where time was up


def test_estimate_of_a_plan_file_is_its_own_price(planned: Planned) -> None:
    result = run("estimate", planned.config, str(planned.plan), "--json")
    assert result.exit_code == 0, result.output
    before, after = json.loads(planned.printed)["estimate"], json.loads(result.stdout)["estimate"]
    assert after["step_time_s"] == pytest.approx(before["step_time_s"], rel=1e-9)
    assert after["collectives"] == before["collectives"]
    assert after["memory"] == before["memory"]


@pytest.mark.parametrize("name", ["fully-sharded", "tensor-parallel", "random:3"])
def test_estimate_of_a_planner_by_name(config: str, name: str) -> None:
    result = run("estimate", config, name, *TINY, *QUICK, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["estimate"]["step_time_s"] > 0
    assert data["solver"]["name"] == name


def test_verify_agrees_with_a_plan(planned: Planned) -> None:
    agreed = run("verify", planned.config, str(planned.plan), "--json")
    assert agreed.exit_code == 0, agreed.output
    report = json.loads(agreed.stdout)
    assert set(report) == {"equal", "expected", "observed", "differences"}
    assert report["equal"] is True
    assert report["expected"] == report["observed"] != []


def test_verify_objects_to_an_edited_plan(planned: Planned, tmp_path: Path) -> None:
    data = json.loads(planned.printed)
    data["estimate"]["collectives"][0]["count"] += 1
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(data))
    differs = run("verify", planned.config, str(edited), "--json")
    assert differs.exit_code == 1, differs.output
    report = json.loads(differs.stdout)
    assert report["equal"] is False
    (difference,) = report["differences"]
    assert difference["expected"] == difference["observed"] + 1


def test_estimate_of_a_configuration_by_its_degrees() -> None:
    """Degrees that the executor cannot run are priced all the same, as text and as JSON."""
    options = ["--cluster", "16x8xh100-sxm-80gb", "--mesh", "fsdp=2,tp=8,pp=8", "--micro-batch", "1", "--batch", "64"]
    result = run("estimate", "llama-3.1-70b", *options, "--seq", "4096", "--sp", "--ac", "full", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["step_time_s"] > sum(data["parts_s"].values()) * 0.99
    assert data["parts_s"]["bubble_s"] > 0
    assert data["memory_bytes"]["allocated"] <= data["memory_bytes"]["reserved"] <= data["memory_bytes"]["device"]
    shown = run("estimate", "llama-3.1-70b", *options, "--seq", "4096", "--sp", "--ac", "full")
    assert shown.exit_code == 0
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())
    for said in ("step time", "MFU", "bubble", "pp = 8", "memory"):
        assert said in shown.stdout


@pytest.mark.parametrize("command_name", ["verify", "estimate"])
def test_plan_of_another_model_is_refused(planned: Planned, command_name: str) -> None:
    result = run(command_name, "gpt2", str(planned.plan))
    assert result.exit_code == 2, result.output
    assert "for another model" in result.stderr


def test_estimate_on_a_cluster_that_the_mesh_does_not_fill_is_refused(planned: Planned) -> None:
    result = run("estimate", planned.config, str(planned.plan), "--cluster", "2x4xtoy")
    assert result.exit_code == 2, result.output
    assert "product is 8" in result.stderr


def test_batch_that_data_parallelism_cannot_divide_is_bad_input(config: str) -> None:
    cluster = ["--cluster", "1x4xtoy", "--mesh", "dp=4", "--batch", "6", "--seq", "32", "--dtype", "fp32"]
    result = run("plan", config, *cluster, *QUICK, "--planner", "data-parallel")
    assert result.exit_code == 2, result.output
    assert "a batch of 6 does not divide over 4 devices" in result.stderr
