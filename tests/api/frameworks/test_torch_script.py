"""Scripts of plans: their text, what they say of the plan, and the collectives of a step on fake processes."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor.placement_types as placement_types
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from api.frameworks.pytorch.text import expression, wrapped
from api.frameworks.torch_script import TorchScript, torch_script
from api.requests.model_registry import load_model
from executor.collective_counter import CollectiveCounter, axes_by_group
from executor.step_on_meta import fake_processes
from executor.verify import expected_collectives
from planner import build_plan
from planner.plan.mesh import PlanMesh
from planner.plan.sharding_plan import Job, ShardingPlan

LLAMA = json.loads((Path(__file__).parents[3] / "examples/tiny_llama.json").read_text())
JOBS: dict[str, dict[str, Any]] = {
    "ddp": {"planner": "ddp", "mesh": "dp=4", "cluster": "1x4xtoy"},
    "fsdp": {"planner": "fsdp", "mesh": "fsdp=4", "cluster": "1x4xtoy", "micro_batches": 2},
    "hsdp": {"planner": "hsdp", "mesh": "dp=2,fsdp=2", "cluster": "2x2xtoy", "ac": "full"},
    "fsdp-tp": {"planner": "fsdp-tp", "mesh": "fsdp=2,tp=2", "cluster": "2x2xh100-sxm-80gb"},
    "tp": {"planner": "tp", "mesh": "tp=4", "cluster": "1x4xtoy", "phase": "prefill"},
    "ilp": {"planner": "ilp", "mesh": "dp=2,tp=2", "cluster": "1x4xtoy"},
}
Sizes = Counter[tuple[str, str, int]]


@functools.cache
def planned(name: str) -> ShardingPlan:
    """Return the plan of one planner for a tiny Llama, for CPUs."""
    source = load_model({"hf_config": LLAMA})
    plan = build_plan(source.module, tp_plan=source.tp_plan, batch=8, seq=32, dtype="fp32", **JOBS[name])
    on_cpu: ShardingPlan = dataclasses.replace(plan, mesh=PlanMesh.from_mesh(plan.mesh, "cpu"))
    return on_cpu


@functools.cache
def written(name: str) -> TorchScript:
    return torch_script(planned(name), load_model({"hf_config": LLAMA}).module, config=LLAMA)


def outcomes(script: TorchScript) -> dict[str, set[str]]:
    """Return field -> the outcomes of its rows that are not "expressed"."""
    fields: dict[str, set[str]] = {}
    for row in script.rows:
        if row.outcome != "expressed":
            fields.setdefault(row.field, set()).add(row.outcome)
    return fields


@pytest.mark.parametrize("name", JOBS)
def test_a_script_imports_torch_transformers_and_the_standard_library_only(name: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse(written(name).text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported <= {"torch", "transformers", *sys.stdlib_module_names}


def test_a_script_is_formatted_and_has_no_unused_names(tmp_path: Path) -> None:
    for name in ("ddp", "fsdp", "hsdp", "fsdp-tp", "tp"):
        tmp_path.joinpath(f"{name.replace('-', '_')}.py").write_text(written(name).text)
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--isolated", "--no-cache", "--line-length", "120", str(tmp_path)]
    for command in (["format", "--check"], ["check", "--select", "E,F,I,UP,B,SIM"]):
        done = subprocess.run([*ruff, *command, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["ddp", "fsdp", "hsdp", "fsdp-tp", "tp"])
def test_plans_that_people_launch_are_expressed_without_loss(name: str) -> None:
    assert outcomes(written(name)) == {}
    assert {"mesh", "parameters", "activations", "dtype"} <= {row.field for row in written(name).rows}


def test_what_styles_cannot_say_of_the_fastest_plan_is_named() -> None:
    details = {row.detail for row in written("ilp").rows if row.outcome != "expressed"}
    assert outcomes(written("ilp")) == {
        "activations": {"approximated"},
        "gradient reduction": {"approximated"},
        "parameters": {"approximated"},
    }
    assert any("over heads, not over the sequence: model.layers.*.self_attn.k_proj" in detail for detail in details)
    assert any("model.norm.weight" in detail for detail in details)


def counted(script: TorchScript, plan: ShardingPlan) -> Sizes:
    """Return (axis, kind, bytes) -> collectives that a step of a script runs on fake processes."""
    module: Any = types.ModuleType("script")
    exec(compile(script.text, "script.py", "exec"), module.__dict__)
    with fake_processes(plan.mesh.size):
        mesh = init_device_mesh("cpu", tuple(module.MESH.values()), mesh_dim_names=tuple(module.MESH))
        model = module.shard(module.build_model(), mesh)
        counter = CollectiveCounter(axes_by_group(mesh), lambda: "forward")
        if plan.job.training:
            batches = next(iter(module.batches(mesh, steps=1)))
            with counter:
                module.train_step(model, batches, mesh)
        else:
            prompt = module.prompt(mesh)
            with counter:
                module.forward(model.eval(), prompt, mesh)
    return sizes(counter.counts)


def sizes(counts: Any) -> Sizes:
    total: Sizes = Counter()
    for key, count in counts.items():
        total[key.axis, key.kind, key.bytes] += count
    return total


@pytest.fixture
def all_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DTensor run the all-to-all that it replaces by an all-gather on CPUs."""

    def exchange(tensor: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, axis: int) -> torch.Tensor:
        group = functional_collectives._resolve_group((mesh, axis))
        name = functional_collectives._group_or_group_name(group)
        exchanged: torch.Tensor = torch.ops._dtensor.shard_dim_alltoall(tensor, gather_dim, shard_dim, name)
        return exchanged

    monkeypatch.setattr(placement_types, "shard_dim_alltoall", exchange)


# DDP's reducer does not run on fake processes: test_torch_script_gloo.py counts its collectives.
@pytest.mark.usefixtures("all_to_all")
@pytest.mark.parametrize("name", ["fsdp", "fsdp-tp", "tp"])
def test_a_script_runs_the_collectives_of_the_plan(name: str) -> None:
    assert counted(written(name), planned(name)) == sizes(expected_collectives(planned(name)))


@pytest.mark.usefixtures("all_to_all")
def test_hsdp_all_reduces_the_bytes_of_the_plan_in_one_call_for_each_group() -> None:
    plan, expected = planned("hsdp"), sizes(expected_collectives(planned("hsdp")))
    observed = counted(written("hsdp"), plan)
    assert {key for key in observed if observed[key] != expected[key]} <= {
        key for key in (*observed, *expected) if key[:2] == ("dp", "all_reduce")
    }
    assert all_reduced(observed) == all_reduced(expected)


def all_reduced(counts: Sizes) -> int:
    return sum(nbytes * count for (axis, kind, nbytes), count in counts.items() if (axis, kind) == ("dp", "all_reduce"))


def test_a_model_without_a_config_is_filled_in_by_the_user() -> None:
    plan = ShardingPlan(
        plan={"0.weight": (Shard(0),), "0.bias": (Replicate(),)},
        compute_plan={"0.weight": (Replicate(),)},
        mesh=PlanMesh(axes=(("fsdp", 4),), device="cpu"),
    )
    script = torch_script(plan, nn.Sequential(nn.Linear(4, 4)))
    assert script.text.startswith("# Fill in build_model() and batches()")
    assert 'raise NotImplementedError("fill in build_model()")' in script.text
    assert "fully_shard(model[0], **options)" in script.text
    assert "transformers" not in script.text
    assert any("replicated in the plan: 0.bias" in row.detail for row in script.rows)


def test_tensor_parallelism_of_an_unknown_model_becomes_fsdp() -> None:
    plan = ShardingPlan(plan={"up.weight": (Shard(0),)}, mesh=PlanMesh(axes=(("tp", 2),), device="cpu"))
    script = torch_script(plan)
    assert "fully_shard(model.up, **options)" in script.text
    assert outcomes(script) == {"parameters": {"approximated"}}


def test_techniques_are_lost_and_precisions_are_said() -> None:
    plan = ShardingPlan(
        plan={"up.weight": (Shard(0),)},
        compute_plan={"up.weight": (Replicate(),)},
        mesh=PlanMesh(axes=(("fsdp", 2),)),
        job=Job(fused_ops=True, attention_kernel="flash3", optimizer="muon"),
    )
    script = torch_script(plan)
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)" in script.text
    assert outcomes(script) == {
        "technique fused-ops": {"lost"},
        "technique flash3": {"lost"},
        "optimizer": {"approximated"},
    }


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        ("", "[model]"),
        ("norm", "[model.norm]"),
        ("layers.*", "model.layers"),
        ("layers.{0-7}", "model.layers[0:8]"),
        ("layers.3.mlp", "[model.layers[3].mlp]"),
        ("layers.*.mlp", "[block.mlp for block in model.layers]"),
        ("a.*.b.*.c", "[block1.c for block in model.a for block1 in block.b]"),
    ],
)
def test_modules_of_a_pattern_as_code(pattern: str, code: str) -> None:
    assert expression(pattern) == code


def test_long_lines_have_one_element_a_line() -> None:
    line = f"    call(first={'a' * 60}, second={'b' * 60}),"
    assert wrapped(line).splitlines() == [
        "    call(",
        f"        first={'a' * 60},",
        f"        second={'b' * 60},",
        "    ),",
    ]
