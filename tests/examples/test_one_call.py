"""One call under a real torchrun, on an own module and on examples/one_call.py, which README shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOOP = "model = auto_parallelize(model)"


def launch(model: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what rank 0 saw, and the lines of ours on standard error."""
    file = folder / "result.json"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_CONFIG_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("SHARDPLAN_CLUSTER", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += [str(Path(__file__).with_name("one_call_on_ranks.py")), model, str(file)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    # torch 2.13 may abort a gloo rank at the interpreter's end, when its work is done (tests/docs says more).
    assert file.exists(), process.stderr
    lines = [line for line in process.stderr.splitlines() if line.startswith("shardplan: ")]
    return json.loads(file.read_text()), lines


def test_an_own_module_trains_as_unsharded(tmp_path: Path) -> None:
    """On each rank `build_plan` makes the same plan; then the module is trained in one call."""
    result, lines = launch("own", tmp_path)
    plans = [Path(f"{tmp_path / 'result.json'}-plan-{rank}").read_text() for rank in range(4)]
    assert len(set(plans)) == 1
    assert result["build_plan"]["verified"] == "as-planned"
    assert [line.split(":")[0] for line in result["build_plan"]["assumed"]] == ["cluster 1x4xcpu"]

    own = result["own"]
    assert own["losses"] == pytest.approx(own["expected"], rel=1e-5)
    assert own["losses"][-1] < own["losses"][0]
    assert own["verified"] == "as-planned"
    assert [line.split(":")[0] for line in own["assumed"]] == ["cluster 1x4xcpu", "dtype fp32"]

    assert sum("process group initialised: 4 ranks, gloo" in line for line in lines) == 1
    assert sum(line.startswith("shardplan: assumed cluster 1x4xcpu: 4 ranks") for line in lines) == 2
    assert sum(line.startswith("shardplan: plan: mesh ") for line in lines) == 1


@pytest.mark.slow
def test_a_hugging_face_model_trains_as_unsharded(tmp_path: Path) -> None:
    """It is examples/one_call.py; tests/executor/launch trains one in every suite."""
    trained = launch("hugging-face", tmp_path)[0]["hugging-face"]
    assert trained["loss"] == pytest.approx(trained["expected"], rel=1e-5)
    # AdamW divides by gradients, some of which are as small as the rounding of others: not in each single element.
    assert trained["difference"] < 1e-4 * trained["distance"]
    assert trained["loss"] < trained["before"]
    fields = [line.split(":")[0] for line in trained["assumed"]]
    assert fields == ["cluster 1x4xcpu", "dtype fp32", "batch 4", "seq 64"]


def test_readme_shows_the_example() -> None:
    example = (ROOT / "examples/one_call.py").read_text()
    loop = LOOP + example.partition(LOOP)[2]
    assert len(loop.strip().splitlines()) == 8
    readme = (ROOT / "README.md").read_text()
    code = [line.partition("  #")[0].rstrip() for line in readme.splitlines()]
    assert loop.strip() in "\n".join(code)
