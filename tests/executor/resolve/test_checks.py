"""Every fault of a plan is an error before the module is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.resolve.place_parameters import place_parameters
from executor.resolve.resolved_plan import resolve_plan
from executor.resolve.sharder import Sharder, apply_sharders
from executor.shard import shard_module
from planner.errors import (
    EmptyPathError,
    KeyConflictError,
    PlanError,
    PlanKeyError,
    PlanLayoutError,
    PlanMismatchError,
    PlanTypeError,
    UnmatchedKeyError,
)
from planner.plan.fingerprint import model_fingerprint, torch_fingerprint
from planner.plan.job import Job
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

PLANNED = PlanMesh.parse("dp=2,tp=4")
REPLICATED = (Replicate(), Replicate())
ROWS = (Replicate(), Shard(0))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


class Identity(Sharder):
    """Returns the module that it gets, with a mark."""

    def shard(self, module: nn.Module) -> nn.Module:
        module.marked = True
        return module


class Wrapper(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return nn.Sequential(module)


class Careless(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return None  # type: ignore[return-value]


class Model(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.Linear(4, 4)
        self.emb = nn.Embedding(8, 4)
        self.emb2 = nn.Embedding(8, 4)
        self.fc1 = nn.Linear(4, 8)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(8, 6)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.emb2.weight
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden: torch.Tensor = self.fc2(self.relu(self.fc1(self.emb(x))))
        return hidden


def state(module: nn.Module) -> list[object]:
    """Return what ``shard_module`` changes in a module."""
    hooks = [(m._forward_hooks.copy(), m._forward_pre_hooks.copy()) for m in module.modules()]
    return [list(map(id, module.modules())), list(map(id, module.parameters())), hooks]


WRONG: dict[str, tuple[dict[str, Any], type[PlanError], str]] = {
    "empty path": ({"plan": {"": "mark"}}, EmptyPathError, "path of a Sharder's module must not be empty"),
    "parameter in a Sharder's tree": (
        {"plan": {"emb.weight": ROWS, "emb": "mark"}},
        KeyConflictError,
        "'emb.weight', but 'emb' goes to the Sharder 'mark'",
    ),
    "pattern into a Sharder's tree": (
        {"plan": {"emb": "mark", "*.weight": REPLICATED}},
        KeyConflictError,
        "'emb.weight'",
    ),
    "tie into a Sharder's tree": ({"plan": {"emb2": "mark", "head.weight": ROWS}}, KeyConflictError, "'emb2.weight'"),
    "compute layout in a tree": (
        {"plan": {"emb": "mark"}, "compute_plan": {"emb.weight": REPLICATED}},
        KeyConflictError,
        "compute",
    ),
    "Sharder in a Sharder's tree": ({"plan": {"blocks": "mark", "blocks.0": "mark"}}, KeyConflictError, "'blocks.0'"),
    "input in a tree": (
        {"plan": {"blocks": "mark"}, "input_plan": {"blocks.1.input": REPLICATED}},
        KeyConflictError,
        "input_plan",
    ),
    "output in a tree": (
        {"plan": {"blocks": "mark"}, "output_plan": {"blocks.*": REPLICATED}},
        KeyConflictError,
        "output_plan",
    ),
    "local in a tree": (
        {"plan": {"blocks": "mark"}, "return_local_tensor": ["blocks.0"]},
        KeyConflictError,
        "return_local",
    ),
    "AC in a tree": (
        {"plan": {"blocks": "mark"}, "activation_checkpointing": {"blocks.0": "full"}},
        KeyConflictError,
        "activ",
    ),
    "tensor in plan": ({"plan": {"fc1.weight": torch.ones(1)}}, PlanTypeError, "plan has Tensor for 'fc1.weight'"),
    "Sharder in plan": ({"plan": {"emb": Identity()}}, PlanTypeError, "plan has Identity for 'emb'"),
    "tensor in output_plan": ({"output_plan": {"": torch.ones(1)}}, PlanTypeError, "output_plan has Tensor for ''"),
    "tensor in input_plan": ({"input_plan": {"relu.input": torch.ones(1)}}, PlanTypeError, "input_plan has Tensor"),
    "no Sharder of that name": ({"plan": {"emb": "absent"}}, UnmatchedKeyError, "which was not passed"),
    "not a Sharder": ({"plan": {"emb": "wrong"}}, PlanTypeError, "sharders has int for 'wrong'"),
    "Sharder for a parameter": ({"plan": {"emb.weight": "mark"}}, UnmatchedKeyError, "matches no module"),
    "no such module": (
        {"plan": {"fc3.weight": ROWS}},
        UnmatchedKeyError,
        "'fc3.weight', but the module has no attribute",
    ),
    "no such parameter": ({"plan": {"fc1.biass": ROWS}}, UnmatchedKeyError, "Close to it: 'fc1.bias'"),
    "a buffer": ({"plan": {"scale": REPLICATED}}, UnmatchedKeyError, "matches no parameter"),
    "a module, not a parameter": ({"plan": {"fc1": ROWS}}, UnmatchedKeyError, "matches no parameter"),
    "no bias": ({"plan": {"head.bias": ROWS}}, UnmatchedKeyError, "has no attribute"),
    "no match for a pattern": ({"plan": {"layers.*.weight": ROWS}}, UnmatchedKeyError, "'layers.*.weight'"),
    "compute_plan": (
        {"compute_plan": {"fc9.weight": ROWS}},
        UnmatchedKeyError,
        "compute_plan has the key 'fc9.weight'",
    ),
    "input_plan": ({"input_plan": {"gelu.input": REPLICATED}}, UnmatchedKeyError, "'gelu'"),
    "input_plan without .input": ({"input_plan": {"relu": REPLICATED}}, PlanKeyError, "Write 'relu.input'"),
    "input_plan of a wrong argument": (
        {"input_plan": {"input": {"y": REPLICATED}}},
        UnmatchedKeyError,
        "takes x, mask",
    ),
    "input_plan of too many arguments": (
        {"input_plan": {"input": [REPLICATED] * 3}},
        UnmatchedKeyError,
        "argument '2'",
    ),
    "output_plan": ({"output_plan": {"gelu": REPLICATED}}, UnmatchedKeyError, "output_plan has the key 'gelu'"),
    "return_local_tensor": (
        {"return_local_tensor": ["gelu"]},
        UnmatchedKeyError,
        "return_local_tensor has the key 'gelu'",
    ),
    "AC": (
        {"activation_checkpointing": {"layers.*": "full"}},
        UnmatchedKeyError,
        "activation_checkpointing has the key",
    ),
    "disagreement": (
        {"plan": {"*.bias": REPLICATED, "fc1.bias": ROWS}},
        KeyConflictError,
        "two keys for 'fc1.bias' that disagree",
    ),
    "disagreement over a tie": (
        {"plan": {"emb2.weight": ROWS, "head.weight": REPLICATED}},
        KeyConflictError,
        "one tied parameter",
    ),
    "too few placements": (
        {"plan": {"fc1.weight": (Shard(0),)}},
        PlanLayoutError,
        "1 placement(s) for 2 axes (dp=2,tp=4)",
    ),
    "too many placements": (
        {"output_plan": {"": (*REPLICATED, Shard(0))}},
        PlanLayoutError,
        "3 placement(s) for 2 axes",
    ),
    "uneven with fused ops": (
        {"plan": {"fc2.weight": ROWS}, "job": Job(fused_ops=True)},
        PlanLayoutError,
        "dim 0 of size 6 does not divide into 4",
    ),
    "uneven over two axes": (
        {"plan": {"head.weight": (Shard(1), Shard(1))}, "job": Job(fused_ops=True)},
        PlanLayoutError,
        "of size 4 does not divide into 8",
    ),
    "uneven at use": (
        {"compute_plan": {"fc2.weight": ROWS}, "job": Job(fused_ops=True)},
        PlanLayoutError,
        "compute_plan gives 'fc2.weight'",
    ),
    "uneven in an FSDP group": (
        {"plan": {"fc2.weight": ROWS}, "compute_plan": {"fc2.weight": REPLICATED}, "fully_shard": {"fc2": ["weight"]}},
        PlanLayoutError,
        "dim 0 of size 6 does not divide into 4",
    ),
    "uneven in strides": (
        {"plan": {"fc2.weight": (Replicate(), _StridedShard(0, split_factor=2))}},
        PlanLayoutError,
        "dim 0 of size 6 does not divide into 4",
    ),
    "no such dim": ({"plan": {"fc1.bias": (Replicate(), Shard(1))}}, PlanLayoutError, "it has no dim 1"),
    "partial parameter": ({"plan": {"fc1.bias": (Replicate(), Partial())}}, PlanLayoutError, "cannot be partial"),
    "mesh shape": (
        {"mesh": PlanMesh.parse("dp=4,tp=2")},
        PlanMismatchError,
        "for the mesh dp=4,tp=2, but the device mesh is dp=2,tp=4",
    ),
    "mesh names": ({"mesh": PlanMesh.parse("tp=2,dp=4")}, PlanMismatchError, "for the mesh tp=2,dp=4"),
    "fewer axes": ({"mesh": PlanMesh.parse("dp=8")}, PlanMismatchError, "for the mesh dp=8"),
    "another model": ({"fingerprint": {"model": "stale"}}, PlanMismatchError, "made for another model"),
    "another torch": ({"fingerprint": {"torch": "1.9"}}, PlanMismatchError, "made for another torch"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_fault_is_an_error_before_the_module_is_changed(name: str, mesh: DeviceMesh) -> None:
    fields, error, message = WRONG[name]
    # A correct entry comes first: it must not be applied either.
    good = {} if "mesh" in fields else {"first.bias": REPLICATED}
    plan = ShardingPlan(**{"mesh": PLANNED, **fields, "plan": good | fields.get("plan", {})})
    module = Model()
    before = state(module)
    sharders: Any = {"mark": Identity(), "wrong": 3}
    with pytest.raises(error) as caught:
        resolve_plan(module, mesh, plan, sharders)
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert caught.value.what_to_do
    assert state(module) == before
    assert not hasattr(module.emb, "marked")


def test_a_correct_plan_passes(mesh: DeviceMesh) -> None:
    module = Model()
    plan = ShardingPlan(
        mesh=PLANNED,
        # emb2 begins with emb, and is another module.
        plan={"emb": "mark", "emb2.weight": ROWS, "head.weight": ROWS, "fc*.bias": REPLICATED, "blocks.*.*": ROWS},
        compute_plan={"head.weight": REPLICATED},
        input_plan={
            "input": {"x": REPLICATED, "1": REPLICATED},
            "relu.input": REPLICATED,
            "blocks.*.input": REPLICATED,
        },
        output_plan={"emb": REPLICATED, "fc2": REPLICATED, "": REPLICATED},
        return_local_tensor=["", "emb"],
        activation_checkpointing={"blocks.*": "full"},
        fingerprint={"model": model_fingerprint(module), "torch": torch_fingerprint(), "cluster": "not ours"},
    )
    resolve_plan(module, mesh, plan, {"mark": Identity()})
    unnamed = init_device_mesh("cpu", (2, 4))
    resolve_plan(module, unnamed, plan, {"mark": Identity()})


def test_a_sharded_module_cannot_be_sharded_again(mesh: DeviceMesh) -> None:
    module = Model()
    plan = ShardingPlan(mesh=PLANNED, plan={"fc1.weight": ROWS})
    place_parameters(resolve_plan(module, mesh, plan), src_data_rank=None)
    with pytest.raises(PlanMismatchError, match="DTensor already"):
        resolve_plan(module, mesh, plan)


def test_parameters_on_meta_stay_there(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        module = Model()
    plan = ShardingPlan(mesh=PLANNED, plan={"fc1.weight": ROWS, "emb2.weight": ROWS})
    place_parameters(resolve_plan(module, mesh, plan))
    assert module.fc1.weight.is_meta
    assert module.fc1.weight.placements == ROWS
    assert module.fc1.weight.to_local().shape == (2, 4)
    assert module.head.weight is module.emb2.weight


def test_sharders_replace_modules_by_pattern_and_under_every_name(mesh: DeviceMesh) -> None:
    def replace(module: Model, pattern: str) -> None:
        plan = ShardingPlan(mesh=PLANNED, plan={pattern: "wrap"})
        apply_sharders(module, resolve_plan(module, mesh, plan, {"wrap": Wrapper()}).sharders)

    module = Model()
    module.alias = module.blocks
    replace(module, "blocks.*")
    assert [type(block) for block in module.blocks] == [nn.Sequential] * 2
    assert module.alias is module.blocks
    assert not hasattr(module, "mod_name")

    module = Model()
    module.alias = module.emb
    replace(module, "emb")
    assert isinstance(module.emb, nn.Sequential)
    assert module.alias is module.emb


def test_keys_do_not_match_modules_that_a_sharder_made(mesh: DeviceMesh) -> None:
    module = Model()
    # *.* matches the blocks alone; the Wrapper then makes an emb.0.
    plan = ShardingPlan(mesh=PLANNED, plan={"emb": "wrap"}, output_plan={"*.*": REPLICATED, "emb": REPLICATED})
    shard_module(module, mesh, plan, sharders={"wrap": Wrapper()})
    hooked = [name for name, submodule in module.named_modules() if name and submodule._forward_hooks]
    assert hooked == ["emb", "blocks.0", "blocks.1"]


def test_a_sharder_that_returns_no_module_changes_nothing(mesh: DeviceMesh) -> None:
    module = Model()
    before = state(module)
    plan = ShardingPlan(mesh=PLANNED, plan={"emb2": "wrap", "emb": "careless", "fc1.weight": ROWS})
    with pytest.raises(PlanTypeError, match="returned NoneType"):
        shard_module(module, mesh, plan, sharders={"wrap": Wrapper(), "careless": Careless()})
    assert state(module) == before


def test_fingerprints_depend_on_structure_alone() -> None:
    module = Model()
    fingerprint = model_fingerprint(module)
    with torch.device("meta"):
        assert model_fingerprint(Model()) == fingerprint
    assert model_fingerprint(Model().to(torch.bfloat16).eval()) == fingerprint
    assert model_fingerprint(Model(heads=4)) != fingerprint
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    assert model_fingerprint(module) != fingerprint
