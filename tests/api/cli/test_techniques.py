"""``--techniques``: one option in the help, former options still taken, and the plan says what it uses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.small_models import TINY_LLAMA
from typer.testing import CliRunner

from api.cli.main import app
from api.render.techniques import technique_lines
from api.requests.schemas import PlanRequest
from cost_model.layouts.layout import MeshSpec
from planner.errors import JobError
from planner.plan.estimate import Estimate
from planner.plan.sharding_plan import PlanMesh, ShardingPlan
from planner.plan.techniques import TechniqueGain

JOB = ["--cluster", "1x4xtoy", "--mesh", "dp=2,tp=2", "--batch", "8", "--seq", "32", "--dtype", "fp32"]
QUICK = ["--micro-batches", "1", "--ac", "none", "--no-cache"]
FORMER = {
    "--fused",
    "--fused-ops",
    "--fused-projections",
    "--packed",
    "--zigzag",
    "--even-order",
    "--reallgather",
    "--regather",
    "--async-tp",
    "--tensor-overlap",
    "--attention-kernel",
    "--heterogeneous-blocks",
    "--vary-blocks",
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY_LLAMA))
    return str(file)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[PlanRequest]:
    requests: list[PlanRequest] = []

    def noted(request: PlanRequest, **_: Any) -> ShardingPlan:
        requests.append(request)
        raise JobError("that is enough.")

    monkeypatch.setattr("api.cli.main.plan_of", noted)
    return requests


@pytest.mark.parametrize("command", ["plan", "estimate", "alternatives", "pareto", "sweep", "batches"])
def test_help_lists_one_option(command: str) -> None:
    options = set(re.findall(r"--[a-z-]+", CliRunner().invoke(app, [command, "--help"]).output))
    assert "--techniques" in options
    assert not options & FORMER


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--techniques", "zigzag,fused-ops"], ("fused-ops", "zigzag")),
        (["--techniques", "zigzag", "--techniques=fused-ops"], ("fused-ops", "zigzag")),
        (["--fused", "--even-order", "--regather"], ("fused-ops", "zigzag", "reallgather")),
        (["--fused-ops", "--zigzag", "--reallgather"], ("fused-ops", "zigzag", "reallgather")),
        (["--vary-blocks", "--attention-kernel", "flash3"], ("flash3", "heterogeneous-blocks")),
        (["--attention-kernel=flash3", "--techniques", "auto"], ("auto", "flash3")),
        (["--tensor-overlap", "--packed"], ("fused-projections", "async-tp")),
        (["--techniques", "none"], ()),
    ],
)
def test_former_options_add_to_the_list(seen: list[PlanRequest], options: list[str], names: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, ["plan", "gpt2", *JOB, *options]).exit_code == 2
    assert [request.techniques for request in seen] == [names]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "gpt2", *JOB, "--techniques", "zigzg"], "did you mean zigzag?"),
        (["plan", "gpt2", *JOB, "--attention-kernel", "flash4"], "'flash4'"),
        (["plan", "gpt2", *JOB, "--async-tp"], "--no-executable-only"),
        (["plan", "gpt2", *JOB, "--techniques", "flash3"], "toy does not run"),
        (["plan", "gpt2", *JOB, "--attention-kernel"], "--attention-kernel"),
        (["pareto", "gpt2", *JOB, "--techniques", "auto,zigzag"], "techniques is auto: for one plan"),
        (["show", "plan.json", "--zigzag"], "No such option"),
    ],
)
def test_a_technique_that_cannot_be_used_is_bad_input(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_a_plan_with_fused_projections_is_made_shown_verified_and_priced(config: str, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    options = [*JOB, *QUICK, "--techniques", "fused-projections,fused-ops"]
    planned = CliRunner().invoke(app, ["plan", config, *options, "-o", file])
    assert planned.exit_code == 0, planned.output
    plan = ShardingPlan.load(file)
    assert [technique.name for technique in plan.techniques] == ["fused-ops", "fused-projections"]
    shown = CliRunner().invoke(app, ["show", file])
    assert "\n".join(technique_lines(plan)) in shown.stdout
    for command in (["verify", config, file], ["estimate", config, file]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output


def test_lines_say_what_each_gives() -> None:
    estimate = Estimate(
        step_time_s=2.0, forward_s=1.0, backward_s=1.0, grad_reduce_s=0.0, optimizer_s=0.0, peak_memory_bytes=1
    )
    techniques = (TechniqueGain(name="fused-ops", gain_s=0.125), TechniqueGain(name="flash3"))
    mesh = PlanMesh.from_mesh(MeshSpec.parse("dp=2"))
    plan = ShardingPlan(mesh=mesh, estimate=estimate, techniques=techniques)
    assert technique_lines(plan) == [
        "Techniques",
        "  fused-ops  without it a step takes 125 ms (6.2%) longer",
        "  flash3     gain not measured",
    ]
    assert technique_lines(ShardingPlan(mesh=mesh)) == []
