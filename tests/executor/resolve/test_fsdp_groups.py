"""FSDP groups are resolved from a plan; every fault is an error before the module is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.executor_cases import FP32, S0, S1, R
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cost_model.layouts.layout import parse_layout
from executor.resolve.fsdp_groups import FsdpGroup
from executor.resolve.resolved_plan import resolve_plan
from executor.resolve.sharder import Sharder
from executor.shard import shard_module
from executor.torch_internals.dtensor import fake_process_group
from planner.errors import (
    KeyConflictError,
    PlanError,
    PlanKeyError,
    PlanLayoutError,
    PlanMismatchError,
    UnmatchedKeyError,
)
from planner.plan.reshard import ReshardAfter
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

MESH = PlanMesh(axes=(("dp", 2), ("tp", 2), ("one", 1)), device="cpu")
REPLICATED, ROWS, COLUMNS = (R, R, R), (S0, R, R), (S1, R, R)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x)) * self.scale.to(x.dtype)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.emb, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x)).square().mean()


def plan_of(**fields: Any) -> ShardingPlan:
    """Return a plan that shards rows of every stored parameter and computes it replicated, with ``fields`` added."""
    parameters = ("blocks.*.up.weight", "blocks.*.down.weight", "frozen.weight", "emb.weight", "blocks.*.scale")
    stored = dict.fromkeys(parameters, ROWS)
    computed = {**dict.fromkeys(parameters, REPLICATED), "head.weight": REPLICATED}
    entries: dict[str, Any] = {
        "plan": stored,
        "compute_plan": computed,
        "gradient_plan": {**stored, "head.weight": ROWS},
        "fully_shard": {"blocks.*": ("up.weight", "down.weight")},
    }
    for name, more in fields.items():
        entries[name] = {**entries.get(name, {}), **more} if isinstance(more, dict) else more
    return ShardingPlan(mesh=MESH, job=FP32, **entries)


def with_layouts(name: str, stored: list[str], computed: list[str]) -> dict[str, Any]:
    """Return plan fields with the layouts of ``blocks.0.<name>``, and unchanged ones of the other block."""
    others = {f"blocks.{index}.{name}": ROWS for index in (0, 1)}
    stored_layout, compute_layout = parse_layout(stored), parse_layout(computed)
    return {
        "plan": {**others, "blocks.0." + name: stored_layout, f"blocks.*.{name}": None},
        "compute_plan": {"blocks.0." + name: compute_layout, "blocks.1." + name: REPLICATED, f"blocks.*.{name}": None},
        "gradient_plan": {**others, "blocks.0." + name: stored_layout, f"blocks.*.{name}": None},
    }


def without_nones(fields: dict[str, Any]) -> ShardingPlan:
    plan = plan_of()
    for name, more in fields.items():
        entries = {**getattr(plan, name), **more}
        entries = {key: value for key, value in entries.items() if value is not None}
        plan = dataclasses.replace(plan, **{name: entries})
    return plan


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_process_group(4):
        yield init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)


def groups_of(model: Model, mesh: DeviceMesh, plan: ShardingPlan) -> tuple[FsdpGroup, ...]:
    return resolve_plan(model, mesh, plan).fsdp_groups


def test_groups_have_the_axes_on_which_their_parameters_are_gathered(mesh: DeviceMesh) -> None:
    model = Model()
    tied = {"": ("emb.weight", "head.weight")}
    outer, *inner = reversed(groups_of(model, mesh, plan_of(fully_shard=tied)))
    assert {group.fqn for group in inner} == {"blocks.0", "blocks.1"}
    (member,) = outer.parameters
    assert (outer.fqn, outer.axes) == ("", (0,))
    assert member.slots == ((model.emb, "weight"), (model.head, "weight"))
    assert (member.stored, member.compute, member.dim) == (ROWS, REPLICATED, 0)


def test_frozen_parameters_have_no_gradient_to_reduce(mesh: DeviceMesh) -> None:
    (group,) = (g for g in groups_of(Model(), mesh, plan_of(fully_shard={"frozen": ("weight",)})) if g.fqn == "frozen")
    (member,) = group.parameters
    assert (member.stored, member.compute, member.accumulated) == (ROWS, REPLICATED, ROWS)


WRONG: dict[str, tuple[dict[str, Any], type[PlanError], str]] = {
    "module pattern": ({"fully_shard": {"layers.*": ("weight",)}}, UnmatchedKeyError, "'layers.*'"),
    "parameter": ({"fully_shard": {"blocks.*": ("up.bias",)}}, UnmatchedKeyError, "'blocks.0.up.bias'"),
    "pattern of parameters": ({"fully_shard": {"blocks.*": ("*.weight",)}}, UnmatchedKeyError, "'blocks.0.*.weight'"),
    "keys that disagree": ({"fully_shard": {"blocks.0": ("up.weight",)}}, KeyConflictError, "disagree"),
    "two groups": ({"fully_shard": {"": ("blocks.0.up.weight",)}}, KeyConflictError, "with 'blocks.0' and with ''"),
    "tie": ({"fully_shard": {"emb": ("weight",)}}, KeyConflictError, "tied to 'head.weight'"),
    "two dtypes": ({"fully_shard": {"blocks.*": ("up.weight", "scale")}}, PlanKeyError, "torch.float64"),
    "list of modules": ({"fully_shard": {"blocks": ("0.up.weight",)}}, PlanKeyError, "never called"),
    "inside a checkpointed block": (
        {
            "fully_shard": {"blocks.*": None, "blocks.*.up": ("weight",)},
            "activation_checkpointing": {"blocks.*": "full"},
        },
        KeyConflictError,
        "'blocks.0', a checkpointed block",
    ),
    "no stored layout": ({"plan": {"blocks.*.up.weight": None}}, PlanLayoutError, "has no stored layout"),
    "no other layout": (with_layouts("up.weight", ["S(0)", "R", "R"], ["S(0)", "R", "R"]), PlanLayoutError, "0 axes"),
    "two dims": (with_layouts("up.weight", ["S(0)", "S(1)", "R"], ["R", "R", "R"]), PlanLayoutError, "not S(d) and R"),
    "axes apart": (with_layouts("up.weight", ["S(0)", "R", "S(0)"], ["R", "R", "R"]), PlanLayoutError, "in a row"),
    "another dim": (with_layouts("up.weight", ["S(0)", "R", "R"], ["S(1)", "R", "R"]), PlanLayoutError, "S(d) and R"),
    "replicated between steps": (
        with_layouts("up.weight", ["R", "R", "R"], ["S(0)", "R", "R"]),
        PlanLayoutError,
        "S(d) and R",
    ),
    "strided": (with_layouts("up.weight", ["SS(0,2)", "S(0)", "R"], ["R", "S(0)", "R"]), PlanLayoutError, "S(d) and R"),
    "interleaved": (
        with_layouts("up.weight", ["S(0)", "S(0)", "R"], ["R", "S(0)", "R"]),
        PlanLayoutError,
        "further in",
    ),
    "axis of one": (with_layouts("up.weight", ["R", "R", "S(0)"], ["R", "R", "R"]), PlanLayoutError, "one rank"),
    "axes of a group": (with_layouts("up.weight", ["R", "S(0)", "R"], ["R", "R", "R"]), PlanLayoutError, "on tp"),
    "no gradient layout": ({"gradient_plan": {"blocks.*.up.weight": None}}, PlanLayoutError, "gradient_plan"),
    "other gradient": ({"gradient_plan": {"blocks.*.up.weight": COLUMNS}}, PlanLayoutError, "gradient_plan"),
    "module of a Sharder": ({"plan": {"blocks.1": "own"}}, KeyConflictError, "'blocks.1'"),
}


class Own(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return module


@pytest.mark.parametrize("name", WRONG)
def test_each_faulty_group_is_an_error_before_the_module_is_changed(mesh: DeviceMesh, name: str) -> None:
    fields, kind, message = WRONG[name]
    model = Model()
    before = [id(parameter) for parameter in model.parameters()], [type(module) for module in model.modules()]
    with pytest.raises(kind) as caught:
        shard_module(model, mesh, without_nones(fields), sharders={"own": Own()}, src_data_rank=None)
    assert message in str(caught.value)
    assert caught.value.what_to_do
    assert before == ([id(p) for p in model.parameters()], [type(module) for module in model.modules()])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_only_modules_of_fully_shard_can_reshard_later(mesh: DeviceMesh) -> None:
    for mode in (ReshardAfter.BACKWARD, ReshardAfter.STEP):
        plan = plan_of(**{mode.value: ("blocks.1",)})
        modes = {group.fqn: group.reshard_after for group in groups_of(Model(), mesh, plan)}
        assert modes == {"blocks.0": ReshardAfter.FORWARD, "blocks.1": mode}
    with pytest.raises(KeyConflictError, match=r"keep_gathered and keep_gathered_for_step both name 'blocks.1'"):
        groups_of(Model(), mesh, plan_of(keep_gathered=("blocks.*",), keep_gathered_for_step=("blocks.1",)))
    with pytest.raises(PlanKeyError, match="'frozen', for which fully_shard gathers nothing"):
        shard_module(Model(), mesh, plan_of(keep_gathered=("frozen",)), src_data_rank=None)
    with pytest.raises(UnmatchedKeyError, match="'layers"):
        shard_module(Model(), mesh, plan_of(keep_gathered=("layers.*",)), src_data_rank=None)


def test_fully_shard_needs_a_mesh_with_names(mesh: DeviceMesh) -> None:
    with pytest.raises(PlanMismatchError, match="needs the names"):
        shard_module(Model(), init_device_mesh("cpu", MESH.shape), plan_of(), src_data_rank=None)


def test_an_outer_axis_may_shard_the_same_dim(mesh: DeviceMesh) -> None:
    fields = with_layouts("up.weight", ["S(0)", "S(0)", "R"], ["S(0)", "R", "R"])
    groups = {"fully_shard": {"blocks.*": None, "blocks.0": ("up.weight",)}}
    (group,) = groups_of(Model(), mesh, without_nones({**fields, **groups}))
    assert (group.axes, group.parameters[0].dim) == ((1,), 0)
