"""Exports: a plan made for a framework loses nothing; what others lose is said; what is read back is the plan."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path

import pytest
from support import families
from torch.distributed.tensor import Replicate, Shard

from api.frameworks.export import TORCH, Exported, export, export_plan, plan_within, planners_of
from api.frameworks.launch import Launch
from api.frameworks.plan_launch import launch_of
from api.frameworks.registry import NAMES, find_framework
from api.render.export import row_lines
from planner.build import build_plan
from planner.errors import JobError, PlanError
from planner.plan.ports import Port
from planner.plan.sharding_plan import ShardingPlan

CLUSTERS = ("1x4xtoy", "2x4xtoy")
TRAINED = [name for name in NAMES if name != "vllm"]


@cache
def plan_for(planner: str, cluster: str, memory_gb: float | None = None, phase: str = "training") -> ShardingPlan:
    module, _ = families.make("llama", 16)
    options = {} if memory_gb is None else {"memory_gb": memory_gb}
    return build_plan(module, cluster=cluster, batch=16, seq=32, planner=planner, phase=phase, dtype="bf16", **options)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", TRAINED)
def test_a_plan_made_for_a_framework_loses_nothing(name: str, cluster: str) -> None:
    plan = plan_for("+".join(planners_of(name)), cluster)
    exported = export(plan, find_framework(name))
    assert exported.loses_nothing, exported.rows


@pytest.mark.parametrize("name", TRAINED)
def test_so_does_the_plan_of_each_baseline_that_it_says(name: str) -> None:
    for planner in find_framework(name).planners:
        launch = launch_of(plan_for(planner, "2x4xtoy"))
        assert find_framework(name).can_write(launch), (planner, launch)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_read_back_is_the_plans_launch(name: str) -> None:
    plan = plan_for("+".join(planners_of(name)), "2x4xtoy")
    framework = find_framework(name)
    exported = export(plan, framework)
    reading = framework.read(exported.text, 8)
    assert not reading.faults
    assert framework.version in exported.text or name in ("transformers",)

    def comparable(launch: Launch) -> Launch:
        unsaid = [field for field in ("seq", "checkpointing", "compiled") if field not in framework.says]
        plain = Launch()
        launch = dataclasses.replace(launch, batch=launch.global_batch, compiled=False)
        return dataclasses.replace(launch, **{field: getattr(plain, field) for field in unsaid})

    assert comparable(reading.launch) == comparable(launch_of(plan))


def test_a_served_plan_is_a_command_line_of_vllm() -> None:
    plan = plan_for("tp+ddp", "1x4xtoy", phase="decode")
    exported = export(plan, find_framework("vllm"))
    assert exported.loses_nothing, exported.rows
    reading = find_framework("vllm").read(exported.text, 4)
    assert not reading.faults
    assert (reading.launch.tensor, reading.launch.data) == (launch_of(plan).tensor, launch_of(plan).data)


def test_what_a_framework_cannot_say_is_said() -> None:
    plan = plan_for("fsdp-tp", "2x4xtoy")
    exported = export(plan, find_framework("deepspeed"))
    assert not exported.loses_nothing
    assert exported.launch is not None
    assert exported.launch.ranks == 8
    text = "\n".join(row_lines(exported, plan, 2.0))
    assert "--for deepspeed" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_checkpointing_of_some_blocks_is_approximated() -> None:
    plan = plan_for("fsdp", "1x4xtoy")
    some = dataclasses.replace(
        plan,
        activation_checkpointing={"model.layers.0": "full"},
        job=dataclasses.replace(plan.job, ac="full:1"),
    )
    rows = {row.field: row for row in export(some, find_framework("torchtitan")).rows}
    assert rows["activation checkpointing"].outcome == "approximated"
    assert "full:1 becomes full" in rows["activation checkpointing"].detail


@pytest.mark.parametrize("is_known", [True, False], ids=["styles say it", "no model to read styles from"])
def test_a_plan_for_a_torch_script_is_tensor_parallel_where_a_script_can_say_it(tmp_path: Path, is_known: bool) -> None:
    config = tmp_path / "config.json"
    module, _ = families.make("llama", 16)
    config.write_text(json.dumps(module.config.to_dict()), encoding="utf-8")  # type: ignore[operator, union-attr]
    asked: list[list[str]] = []

    def plan_of(planner: str) -> ShardingPlan:
        asked.append(planner.split("+"))
        found = plan_for("fsdp-tp" if "fsdp-tp" in asked[-1] else "fsdp", "1x4xtoy")
        return dataclasses.replace(found, model=str(config) if is_known else None)

    plan = plan_within(TORCH, plan_of)
    assert plan.solver is not None
    assert plan.solver.name == ("fsdp-tp" if is_known else "fsdp")
    assert not export_plan(plan, TORCH).has_loss
    dropped = [set(asked[0]) - set(names) for names in asked]
    assert dropped == ([set()] if is_known else [set(), {"fsdp-tp"}])
    if not is_known:
        text = "\n".join(row_lines(export_plan(plan_of("fsdp-tp"), TORCH), plan, None))
        assert "--for torch" in text
        assert "not known" in text


def test_a_gathered_batch_is_still_data_parallel() -> None:
    """A baseline may run a small classifier on all samples, so that no gradient of it is reduced."""
    plan = plan_for("ddp", "1x4xtoy")
    gathers = Port(layout=(Replicate(),), grad=(Replicate(),), source=(Shard(0),), source_grad=(Shard(0),))
    exported = export_plan(dataclasses.replace(plan, input_plan={**plan.input_plan, "lm_head.input": gathers}), TORCH)
    assert "DistributedDataParallel" in exported.text
    assert not exported.has_loss
    details = [row.detail for row in exported.rows if (row.field, row.outcome) == ("activations", "approximated")]
    assert details == ["each rank has its own samples at lm_head.input, where the plan gathers the batch"]


def test_a_training_plan_is_no_server() -> None:
    with pytest.raises(PlanError, match="vLLM has no configuration that is near this plan"):
        export(plan_for("fsdp", "1x4xtoy"), find_framework("vllm"))


def test_names() -> None:
    assert isinstance(export_plan(plan_for("fsdp", "1x4xtoy"), "torch"), Exported)
    with pytest.raises(JobError, match="no framework 'jax'"):
        export_plan(plan_for("fsdp", "1x4xtoy"), "jax")


@pytest.mark.parametrize(
    ("groups", "kept", "reshards"),
    [
        (("blocks.0", "blocks.{1-3}", "head"), ("blocks.*",), False),
        (("blocks.0", "blocks.{1-3}", "head"), ("blocks.0", "head"), True),
        (("blocks.*", "head"), ("head",), True),
        (("fc1", "fc2"), ("fc1", "fc2"), False),
        (("fc1", "fc2"), ("fc1",), True),
        (("blocks.*",), (), True),
    ],
)
def test_groups_of_blocks_say_when_parameters_are_resharded(
    groups: tuple[str, ...], kept: tuple[str, ...], reshards: bool
) -> None:
    plan = plan_for("fsdp", "1x4xtoy")
    grouped = dataclasses.replace(plan, fully_shard=dict.fromkeys(groups, ("weight",)), keep_gathered=kept)
    assert launch_of(grouped).reshard_after_forward is reshards


def test_the_page_and_the_command_line_name_every_framework() -> None:
    page = Path("api/static/js/pages/job.js").read_text(encoding="utf-8")
    assert re.findall(r'^  \["([\w-]+)", ', page, re.MULTILINE) == [TORCH, *(name for name in NAMES if name != TORCH)]
    commands = Path("docs/reference/cli.md").read_text(encoding="utf-8")
    assert all(name in commands for name in NAMES)
