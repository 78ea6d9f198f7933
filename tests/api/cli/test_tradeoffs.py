"""`shardplan alternatives`, `pareto` and `sweep`, as a person and as a program call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from api.cli.main import app
from cost_model.layouts.layout import MeshSpec
from planner.plan.sharding_plan import ShardingPlan

CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 1,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 256,
    "n_positions": 32,
}
JOB = ["--batch", "8", "--seq", "16", "--dtype", "fp32", "--ac", "none"]


def run(tmp_path: Path, command: str, *options: str) -> Result:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    return CliRunner().invoke(app, [command, str(config), *JOB, *options])


def rows_of(done: Result) -> list[dict[str, Any]]:
    assert done.exit_code == 0, done.output
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_alternatives(tmp_path: Path) -> None:
    options = ["--cluster", "1x4xtoy", "--count", "1"]
    rows = rows_of(run(tmp_path, "alternatives", *options, "-o", str(tmp_path / "plans"), "--json"))
    assert {MeshSpec.parse(row["mesh"]).shape for row in rows} == {(4,), (2, 2)}
    assert [row["best"] for row in rows] == [True, False]
    assert rows[0]["step_time_s"] <= rows[1]["step_time_s"] * 1.002
    for number, row in enumerate(rows, 1):
        plan = ShardingPlan.load(tmp_path / "plans" / f"{number}.json")
        assert plan.estimate is not None
        assert plan.estimate.step_time_s == row["step_time_s"]
        assert plan.estimate.peak_memory_bytes == row["peak_memory_bytes"]


@pytest.mark.parametrize("command", ["alternatives", "pareto", "sweep"])
def test_gradients_may_be_reduced_in_16_bits_ops_fused_and_inputs_gathered_again(tmp_path: Path, command: str) -> None:
    options = ["--cluster", "1x2xtoy", "--dtype", "bf16", "--reduce-dtype", "bf16", "--fused-ops", "--reallgather"]
    rows = rows_of(run(tmp_path, command, *options, "-o", str(tmp_path / "plans"), "--json"))
    plans = [ShardingPlan.load(tmp_path / "plans" / f"{number}.json") for number in range(1, len(rows) + 1)]
    assert {(plan.job.reduce_dtype, plan.job.reallgather) for plan in plans} == {("bf16", True)}
    assert all("run as fused ops: 1 cross_entropy." in plan.notes for plan in plans)


def test_pareto_as_a_table(tmp_path: Path) -> None:
    options = ["--cluster", "1x2xtoy", "--mesh", "dp=2"]
    rows = rows_of(run(tmp_path, "pareto", *options, "--json"))
    shown = run(tmp_path, "pareto", *options)
    assert shown.exit_code == 0, shown.output
    header, *lines = shown.stdout.splitlines()
    assert header.split()[:2] == ["#", "Mesh"]
    assert len(lines) >= len(rows) >= 2
    assert all(line.split()[0] == str(number) for number, line in enumerate(lines[: len(rows)], 1))
    assert "*" in lines[0]
    peaks = [row["peak_memory_bytes"] for row in rows]
    assert peaks == sorted(peaks, reverse=True)


def test_sizes(tmp_path: Path) -> None:
    options = ["--cluster", "1x2xtoy", "--price", "3.6"]
    one, two = rows_of(run(tmp_path, "sweep", *options, "--objective", "step-time", "--json"))
    assert (one["cluster"], two["cluster"]) == ("1x1xtoy", "1x2xtoy")
    assert (one["best"], two["best"]) == (False, True)
    assert two["device_s"] == pytest.approx(2 * two["step_time_s"])
    assert two["price"] == pytest.approx(two["device_s"] / 1000)

    too_small = (one["peak_memory_bytes"] + two["peak_memory_bytes"]) / 2e9
    shown = run(tmp_path, "sweep", *options, "--memory-gb", str(too_small), "--micro-batches", "1")
    assert shown.exit_code == 0, shown.output
    assert "nothing fits" in shown.stdout.splitlines()[1]
    none = run(tmp_path, "sweep", *options, "--within", str(two["step_time_s"] / 2))
    assert none.exit_code == 0, none.output
    assert "None of these" in none.stdout


def test_numbers_of_devices_on_demand(tmp_path: Path) -> None:
    rows = rows_of(run(tmp_path, "sweep", "--cluster", "2x2xtoy", "--devices", "1,2", "--micro-batches", "1", "--json"))
    assert [row["cluster"] for row in rows] == ["1x1xtoy", "1x2xtoy"]


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("sweep", ["--cluster", "1x2xtoy", "--devices", "1,x"], "--devices is '1,x'"),
        ("sweep", ["--cluster", "1x2xtoy", "--devices", "3"], "from 1 to 2"),
        ("sweep", ["--cluster", "1x2xtoy", "--within", "0"], "--within is 0.0"),
        ("sweep", ["--cluster", "1x2xtoy", "--price", "-1"], "--price is -1.0"),
        ("pareto", ["--cluster", "1x2xtoy", "-o", "/no/such/folder"], "--output /no/such/folder"),
        ("pareto", ["--cluster", "1x2xtoy", "--memory-gb", "0.00001"], "No plan fits"),
        ("alternatives", ["--cluster", "1x2xtoi"], "toi"),
    ],
)
def test_bad_input(tmp_path: Path, command: str, options: list[str], said: str) -> None:
    done = run(tmp_path, command, *options)
    assert done.exit_code in (2, 3)
    assert said in done.output
    assert "Traceback" not in done.output


def test_batches(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    options = ["--cluster", "1x2xtoy", "--mesh", "dp=2", "--seq", "16", "--dtype", "fp32", "--most", "4"]
    done = CliRunner().invoke(app, ["batches", str(config), *options, "-o", str(tmp_path / "plans"), "--json"])
    rows = rows_of(done)
    assert [row["batch"] for row in rows] == [1, 2, 4]
    assert [row["best"] for row in rows].index(True) == max(
        range(len(rows)), key=lambda i: rows[i]["items_per_s_per_device"]
    )
    for number, row in enumerate(rows, 1):
        plan = ShardingPlan.load(tmp_path / "plans" / f"{number}.json")
        assert (plan.job.phase, plan.job.batch) == ("decode", row["batch"])
        assert row["items_per_s_per_device"] == row["batch"] / row["step_time_s"] / 2
    shown = CliRunner().invoke(app, ["batches", str(config), *options])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.split()[:3] == ["#", "Batch", "Mesh"]
    refused = CliRunner().invoke(app, ["batches", str(config), *options, "--within", "0"])
    assert refused.exit_code == 2


def test_a_decoding_plan_says_what_it_is_for(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    options = ["--cluster", "1x2xtoy", "--phase", "decode", "--batch", "4", "--seq", "16", "--mesh", "dp=2"]
    shown = CliRunner().invoke(app, ["plan", str(config), *options, "--no-cache"])
    assert shown.exit_code == 0, shown.output
    for said in ("4 sequences with 16 tokens in the cache", "KV cache", "tokens/s"):
        assert said in shown.stdout
    assert "backward" not in shown.stdout
    refused = CliRunner().invoke(app, ["plan", str(config), *options, "--micro-batches", "2", "--no-cache"])
    assert refused.exit_code == 2


def test_former_names_of_commands_and_options_are_taken(tmp_path: Path) -> None:
    shown = run(tmp_path, "runner-ups", "--cluster", "1x2xtoi", "--fused", "--regather", "--even-order")
    assert "toi" in shown.stderr
    unknown = run(tmp_path, "runner-ups", "--cluster", "1x2xtoi", "--fuse")
    assert "No such option" in unknown.stderr
