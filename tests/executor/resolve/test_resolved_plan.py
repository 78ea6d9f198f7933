"""``ResolvedPlan``: every field of a plan is resolved once, into layouts and modules by FQN."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from support.executor_cases import FP32, MESH, S0, R
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from executor.resolve.resolved_plan import resolve_plan
from executor.resolve.sharder import Sharder
from executor.shard import shard_module
from executor.torch_internals.dtensor import fake_process_group
from planner.errors import KeyConflictError
from planner.plan import patterns
from planner.plan.sharding_plan import Port, ShardingPlan
from planner.plan.token_order import ZigzagOrder

REPLICATED, ROWS = (R, R), (S0, R)
PARTS = ("weight", "bias")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.up(x))
        return hidden


class Model(nn.Module):
    """Its head is tied to its embedding, and ``alias`` is another name of its first block."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.alias = self.blocks[0]
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def make_plan(**fields: Any) -> ShardingPlan:
    entries: dict[str, Any] = {
        "plan": {"emb.weight": ROWS, "blocks.*.up.weight": ROWS},
        "compute_plan": {"blocks.*.up.weight": REPLICATED, "head.weight": REPLICATED},
        "gradient_plan": {"blocks.*.up.weight": ROWS},
        "input_plan": {"input": {"ids": ROWS}, "blocks.*.input": REPLICATED},
        "output_plan": {"blocks.1": REPLICATED},
        "return_local_tensor": ("",),
        "activation_checkpointing": {"blocks.*": "full"},
        "fully_shard": {"blocks.1": ("up.weight",)},
        "keep_gathered": ("blocks.1",),
    }
    return ShardingPlan(mesh=MESH, job=FP32, **{**entries, **fields})


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_process_group(MESH.size):
        yield init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)


def test_parameters_have_their_layouts_under_each_of_their_names(mesh: DeviceMesh) -> None:
    model = Model()
    resolved = resolve_plan(model, mesh, make_plan(fully_shard={}, keep_gathered=()))
    layouts = {fqn: (item.stored, item.compute, item.gradient) for fqn, item in resolved.parameters.items()}
    assert layouts == {
        "emb.weight": (ROWS, ROWS, None),
        "head.weight": (ROWS, REPLICATED, None),
        "blocks.0.up.weight": (ROWS, REPLICATED, ROWS),
        "blocks.1.up.weight": (ROWS, REPLICATED, ROWS),
        # Under another name of its module, which the plan does not name.
        "alias.up.weight": (ROWS, ROWS, None),
        # The plan lays out the inputs, so all other parameters are replicated.
        **{
            f"{name}.down.{part}": (REPLICATED, REPLICATED, None)
            for name in ("blocks.0", "blocks.1", "alias")
            for part in PARTS
        },
    }
    by_owner = resolved.parameters_outside_fsdp()
    assert [(item.attribute, item.compute) for item in by_owner[model.alias.up]] == [("weight", REPLICATED)]


def test_boundaries_have_ports_by_argument_and_result(mesh: DeviceMesh) -> None:
    order = ZigzagOrder(axis="tp", length=16, inputs={"input": {"ids": 1}}, outputs={"emb": {"": 1}})
    boundaries = resolve_plan(Model(), mesh, make_plan(zigzag=order)).boundaries
    whole = Port(layout=REPLICATED)
    assert boundaries.inputs == {"": {"ids": Port(layout=ROWS)}, "blocks.0": {"": whole}, "blocks.1": {"": whole}}
    assert boundaries.outputs == {"blocks.1": {"": whole}}
    assert (boundaries.zigzag_inputs, boundaries.zigzag_outputs) == ({"": {"ids": 1}}, {"emb": {"": 1}})
    assert boundaries.local_outputs == ("",)


def test_a_resolved_plan_is_frozen_and_the_module_unchanged(mesh: DeviceMesh) -> None:
    model = Model()
    before = [id(parameter) for parameter in model.parameters()]
    resolved = resolve_plan(model, mesh, make_plan())
    assert [id(parameter) for parameter in model.parameters()] == before
    assert resolved.checkpointing == {"blocks.0": "full", "blocks.1": "full"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.checkpointing = {}  # type: ignore[misc]


def test_shard_module_resolves_each_field_once(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[tuple[str, ...]] = Counter()
    match_keys = patterns.match_keys

    def record(keys: Iterable[str], fqns: Iterable[str]) -> dict[str, tuple[str, ...]]:
        keys = tuple(keys)
        calls[keys] += 1
        return match_keys(keys, fqns)

    monkeypatch.setattr(patterns, "match_keys", record)
    # Each field has other keys, so that calls are those of one field.
    plan = make_plan(
        plan={"emb.weight": ROWS, "blocks.*.up.*": ROWS},
        output_plan={"blocks.1.up": REPLICATED},
        keep_gathered=("blocks.{1-1}",),
    )
    shard_module(Model(), mesh, plan, src_data_rank=None)
    assert ("blocks.1",) in calls
    assert {count for keys, count in calls.items() if keys} == {1}


class Own(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return module


def test_token_order_inside_a_sharders_module_is_an_error(mesh: DeviceMesh) -> None:
    order = ZigzagOrder(axis="tp", length=16, outputs={"blocks.0.up": {"": 1}})
    plan = ShardingPlan(mesh=MESH, job=FP32, plan={"blocks.0": "own"}, zigzag=order)
    with pytest.raises(KeyConflictError, match=r"zigzag names 'blocks.0.up', but 'blocks.0' goes to the Sharder"):
        resolve_plan(Model(), mesh, plan, {"own": Own()})
