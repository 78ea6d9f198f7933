"""`auto_parallelize`, and `build_plan` in its ranks, under a real torchrun."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.one_call import STEPS, Regression

from executor import auto_parallelize, mesh_of, plan_of
from planner.errors import PlanError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Return what `support.one_call` writes under torchrun with 4 ranks, and what it prints."""
    file = tmp_path_factory.mktemp("one-call") / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, "tests/support/one_call.py", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    return {**found, "said": done.stderr}


@pytest.mark.parametrize("case", ["own", "llama", "device_mesh"])
def test_losses_are_those_of_the_unsharded_module(results: Mapping[str, Any], case: str) -> None:
    found = results[case]
    assert found["sharded"] == pytest.approx(found["unsharded"], rel=1e-5)
    assert len(set(found["unsharded"])) == STEPS


def test_the_plan_is_for_the_ranks_and_says_what_was_assumed(results: Mapping[str, Any]) -> None:
    found = results["llama"]
    assert found["shape"] == [4]
    assert "repeat" not in found["mesh"]
    assert [line.partition(":")[0] for line in found["assumed"]] == [
        "cluster 1x4xcpu",
        "micro_batches 1",
        "dtype fp32",
        "batch 4",
        "seq 64",
    ]
    assert "catalogue's device cpu" in found["assumed"][0]
    for line in found["assumed"]:
        assert f"shardplan: assumed {line}" in results["said"]
    assert "started a process group of 4 ranks (gloo)" in results["said"]


def test_a_device_mesh_is_the_plan_s_mesh_and_the_one_that_runs(results: Mapping[str, Any]) -> None:
    found = results["device_mesh"]
    assert found["mesh"] == "data=2,model=2"
    assert found["is_given"]


@pytest.mark.parametrize(
    ("case", "error", "said"),
    [
        ("other_size", "JobError", "has 8 devices, and 4 ranks were started"),
        ("no_inputs", "ModelError", "Give example_inputs"),
        ("untraceable", "ModelError", "no forward"),
        ("mesh_of_some_ranks", "MeshError", "a mesh of all ranks"),
        ("not_a_planner_error", "PlanError", "rank 0 failed while it planned: KeyError"),
    ],
)
def test_every_rank_raises_the_error_of_rank_0(results: Mapping[str, Any], case: str, error: str, said: str) -> None:
    raised = results["refusals"][case]
    assert [name for name, _ in raised[1:]] == [error] * 3
    assert all(said in text for _, text in raised[1:])
    own = raised[0] if case != "not_a_planner_error" else [error, raised[1][1]]
    assert own == raised[1]


def test_build_plan_in_every_rank_gives_one_plan_with_a_reason_for_no_verification(results: Mapping[str, Any]) -> None:
    found = results["build_plan"]
    assert found["equal"]
    assert found["assumed"][0].startswith("cluster 1x4xcpu: 4 ranks without a GPU")
    assert "process group (gloo) is initialised" in found["reason"]


def test_a_module_without_a_plan_says_so() -> None:
    for read in (plan_of, mesh_of):
        with pytest.raises(PlanError, match="was not sharded"):
            read(Regression())


def test_without_torchrun_the_error_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(PlanError, match="torchrun --nproc-per-node N"):
        auto_parallelize(Regression())
