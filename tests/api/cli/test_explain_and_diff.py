"""`shardplan explain` and `shardplan diff`, as a person and as a program call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from api.render.plan_diff import diff_plans
from planner.plan.sharding_plan import ShardingPlan


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plans")
    config = folder / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "n_layer": 2,
                "n_embd": 64,
                "n_head": 4,
                "vocab_size": 256,
                "n_positions": 32,
            }
        )
    )
    found = {"config": config}
    common = ["--cluster", "1x4xtoy", "--batch", "8", "--seq", "16", "--mesh", "dp=2,tp=2"]
    more = {"ilp": ["--micro-batches", "1", "--ac", "none"], "full": ["--micro-batches", "2", "--ac", "full"]}
    for name, options in more.items():
        found[name] = folder / f"{name}.json"
        done = CliRunner().invoke(app, ["plan", str(config), *common, *options, "-o", str(found[name])])
        assert done.exit_code == 0, done.output
    return found


def test_explain_as_a_table_and_as_json(files: dict[str, Path]) -> None:
    command = ["explain", str(files["config"]), str(files["ilp"]), "transformer.h.0.mlp.c_fc.bias"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "Stored as" in shown.output
    assert "Computed as" in shown.output
    assert shown.output.count("the plan's") == 2, "a row of each table"
    data = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    estimate = ShardingPlan.load(files["ilp"]).estimate
    assert estimate is not None
    assert data["plan"]["step_time_s"] == pytest.approx(estimate.step_time_s)
    assert {row["aspect"] for row in data["alternatives"]} == {"stored", "computed"}
    assert sum(row["chosen"] for row in data["alternatives"]) == 2


def test_explain_of_a_parameter_that_is_not_there(files: dict[str, Path]) -> None:
    done = CliRunner().invoke(app, ["explain", str(files["config"]), str(files["ilp"]), "wte"])
    assert done.exit_code == 2
    assert "no parameter 'wte'" in done.stderr
    assert "Traceback" not in done.output + done.stderr


def test_pins_on_the_command_line(files: dict[str, Path], tmp_path: Path) -> None:
    common = [
        "plan",
        str(files["config"]),
        "--cluster",
        "1x4xtoy",
        "--batch",
        "8",
        "--seq",
        "16",
        "--mesh",
        "dp=2,tp=2",
    ]
    output = tmp_path / "pinned.json"
    pin = ["--micro-batches", "1", "--ac", "none", "--pin", "transformer.h.*.mlp.c_fc.weight=S(1)@tp"]
    done = CliRunner().invoke(app, [*common, *pin, "--data-axis", "dp", "-o", str(output)])
    assert done.exit_code == 0, done.output
    plan = ShardingPlan.load(output)
    assert [str(placement) for placement in plan.plan["transformer.h.*.mlp.c_fc.weight"]][1] == "S(1)"
    assert (plan.job.pins, plan.job.data_axes) == (("transformer.h.*.mlp.c_fc.weight=S(1)@tp",), ("dp",))
    refused = CliRunner().invoke(app, [*common, "--pin", "wte=S(0)"])
    assert refused.exit_code == 2
    assert "'wte=S(0)' is no pin" in refused.stderr


def test_a_plan_differs_in_nothing_from_itself(files: dict[str, Path]) -> None:
    done = CliRunner().invoke(app, ["diff", str(files["ilp"]), str(files["ilp"])])
    assert done.exit_code == 0
    assert "The plans are equal." in done.output
    assert json.loads(CliRunner().invoke(app, ["diff", *[str(files["ilp"])] * 2, "--json"]).output)["equal"] is True


def test_every_difference_is_found(files: dict[str, Path]) -> None:
    left, right = (ShardingPlan.load(files[name]) for name in ("ilp", "full"))
    found = diff_plans(left, right)
    assert not found.equal
    settings = {(change.field, change.key): (change.left, change.right) for change in found.settings}
    assert settings["micro_batches", ""] == (1, 2)
    assert ("activation_checkpointing", "transformer.h.*") in settings
    assert left.estimate is not None
    assert right.estimate is not None
    peak = next(change for change in found.nbytes if change.key == "peak")
    assert (peak.left, peak.right) == (left.estimate.peak_memory_bytes, right.estimate.peak_memory_bytes)
    shown = CliRunner().invoke(app, ["diff", str(files["ilp"]), str(files["full"])])
    assert shown.exit_code == 0
    assert "micro_batches" in shown.output
    assert "step time" in shown.output


def test_diff_of_a_file_that_is_no_plan(files: dict[str, Path]) -> None:
    done = CliRunner().invoke(app, ["diff", str(files["ilp"]), str(files["config"])])
    assert done.exit_code == 2
    assert "Traceback" not in done.output + done.stderr
