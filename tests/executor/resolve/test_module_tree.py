"""A copy of a module's tree without values, and a tree that is as it was after a change has failed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.executor_cases import FP32, MESH, make_model
from torch import nn

from executor.resolve.mesh import device_mesh_for
from executor.resolve.module_tree import meta_tree, restored_on_error
from executor.shard import shard_module
from executor.torch_internals.dtensor import fake_process_group
from planner.errors import PlanError
from planner.model_rewrites.fuse_projections import count_fused_projections
from planner.plan.fingerprint import model_fingerprint
from planner.plan.sharding_plan import ShardingPlan


class Other(nn.BatchNorm1d):
    pass


def test_the_copy_has_the_structure_and_no_values() -> None:
    model = make_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.norm.weight.requires_grad_(False)
    tree = meta_tree(model)
    assert model_fingerprint(tree) == model_fingerprint(model)
    assert tree.lm_head.weight is tree.model.embed_tokens.weight
    assert not tree.model.norm.weight.requires_grad
    assert all(tensor.is_meta for tensor in (*tree.parameters(), *tree.buffers()))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    tree.model.layers[0].mlp = nn.Identity()
    tree.model.norm.register_buffer("added", torch.zeros(1))
    assert not isinstance(model.model.layers[0].mlp, nn.Identity)
    assert "added" not in model.model.norm._buffers


def test_a_tree_is_as_it_was_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    calls: list[str] = []
    handle = model[0].register_forward_hook(lambda *_: calls.append("before"))
    before = [(id(part), type(part), dict(vars(part)), dict(part._parameters)) for part in model.modules()]

    def change_and_fail() -> None:
        model[0].register_forward_hook(lambda *_: calls.append("added"))
        model[0].weight = nn.Parameter(torch.zeros(2, 2))
        model[1].__class__ = Other
        model[1].register_buffer("added", torch.zeros(1))
        model[1].__dict__["note"] = 1
        model.add_module("added", nn.ReLU())
        model[0] = nn.Identity()
        raise OSError("no such table")

    with pytest.raises(OSError, match="no such table"), restored_on_error(model):
        change_and_fail()
    assert [(id(part), type(part), dict(vars(part)), dict(part._parameters)) for part in model.modules()] == before
    model(torch.zeros(2, 2))
    assert calls == ["before"]
    # The handle still refers to the module's own hooks.
    handle.remove()
    model(torch.zeros(2, 2))
    assert calls == ["before"]


def test_a_plan_that_fails_its_checks_leaves_projections_apart() -> None:
    model = make_model("llama")
    names = [name for name, _ in model.named_parameters()]
    plan = ShardingPlan(mesh=MESH, job=dataclasses.replace(FP32, fused_projections=True), plan={"absent": ()})
    with fake_process_group(4):
        mesh = device_mesh_for(plan)
        with pytest.raises(PlanError, match="absent"):
            shard_module(model, mesh, plan)
    assert count_fused_projections(model) == 0
    assert [name for name, _ in model.named_parameters()] == names
