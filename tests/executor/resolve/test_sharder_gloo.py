"""Sharders and hand-written plans, as of torch's ``_shard`` and HyperParallel, compared with the unsharded module."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from executor.resolve.sharder import Sharder
from executor.shard import shard_module
from planner.plan.job import Job
from planner.plan.planner_interface import ShardingPlanner
from planner.plan.sharding_plan import PlanMesh, ShardingPlan


def apply_plan(module: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, sharders=None, src_data_rank=0) -> nn.Module:
    # A plan's job computes in bf16 unless it says otherwise.
    plan = dataclasses.replace(plan, job=Job(dtype="fp32"))
    return shard_module(module, mesh, plan, sharders=sharders, src_data_rank=src_data_rank)


class Bags(nn.Module):
    """A collection of embedding bags: indices [batch, bag] -> [bags * batch, dims]."""

    def __init__(self, bags: int, rows: int, dims: int) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({f"table_{i}": nn.EmbeddingBag(rows, dims, mode="sum") for i in range(bags)})

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(indices) for table in self.tables.values()])


class ShardedBag(nn.Module):
    """One bag, sharded by rows (masked lookups, partial sums) or by columns."""

    def __init__(self, bag: nn.EmbeddingBag, mesh: DeviceMesh, dim: int) -> None:
        super().__init__()
        self.mesh, self.dim = mesh, dim
        self.weight = nn.Parameter(distribute_tensor(bag.weight.detach(), mesh, [Shard(dim)]))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        rows = self.weight.shape[0] // self.mesh.size()
        first = rows * self.mesh.get_local_rank() if self.dim == 0 else 0

        def lookup(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            here = (indices >= first) & (indices < first + weight.shape[0])
            return F.embedding_bag(
                torch.where(here, indices - first, 0), weight, mode="sum", per_sample_weights=here.to(weight.dtype)
            )

        output = [Partial()] if self.dim == 0 else [Shard(1)]
        placements = ([Shard(self.dim)], None)
        sharded = local_map(lookup, out_placements=output, in_placements=placements, device_mesh=self.mesh)
        return sharded(self.weight, indices).redistribute(placements=[Replicate()]).to_local()


class BagSharder(Sharder):
    """Shards the first half of the bags by rows, the others by columns."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def shard(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, Bags)
        sharded = copy.deepcopy(module)
        for index, (name, table) in enumerate(module.tables.items()):
            assert isinstance(table, nn.EmbeddingBag)
            sharded.tables[name] = ShardedBag(table, self.mesh, 0 if index < len(module.tables) // 2 else 1)
        return sharded


class BagModel(nn.Module):
    """A model with a module ``ebc2``, which is no part of ``ebc``."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = Bags(4, 8, 8)
        self.ebc2 = nn.Linear(8, 4)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.ebc2(self.ebc(indices))


def bags_half_by_rows_half_by_columns(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    # Each rank starts with its own values; those of rank 0 are used.
    torch.manual_seed(rank)
    sharded = BagModel()
    torch.manual_seed(0)
    local = BagModel()
    replicated = (Replicate(),)
    plan = ShardingPlan(
        mesh=PlanMesh.parse("tp=4"),
        plan={"ebc": "bags", "ebc2.weight": (Shard(1),), "ebc2.bias": replicated},
        input_plan={"ebc2.input": replicated},
        output_plan={"": replicated},
        return_local_tensor=("",),
    )
    # Through JSON values: a plan names its Sharders, and contains none.
    plan = ShardingPlan.from_dict(plan.to_dict())
    apply_plan(sharded, mesh, plan, {"bags": BagSharder(mesh)})
    placements = [tuple(table.weight.placements) for table in sharded.ebc.tables.values()]
    assert placements == [(Shard(0),), (Shard(0),), (Shard(1),), (Shard(1),)]
    assert sharded.ebc.tables["table_0"].weight.to_local().shape == (2, 8)
    assert sharded.ebc2.weight.to_local().shape == (4, 2)

    indices = torch.tensor([[0, 1, 7, 3], [4, 5, 6, 6]])
    weights = torch.linspace(-1, 1, 8 * 4).reshape(8, 4)
    expected, output = local(indices), sharded(indices)
    assert type(output) is torch.Tensor
    torch.testing.assert_close(output, expected)
    (expected * weights).sum().backward()
    (output * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in sharded.named_parameters()}
    for name, parameter in local.named_parameters():
        gradient = gradients[name]
        assert isinstance(gradient, DTensor)
        if "tables" in name:
            # Sharded like the table: a gathered gradient would take the memory that sharding saves.
            assert gradient.placements == sharded.get_parameter(name).placements
        torch.testing.assert_close(gradient.full_tensor(), parameter.grad)


def test_a_sharder_of_embedding_bags_equals_the_unsharded_module() -> None:
    run_on_gloo(bags_half_by_rows_half_by_columns, 4)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.relu(self.fc1(x)))


class ChunkAll(ShardingPlanner):
    """Shards dim 0 of every parameter, as torch's example of a planner."""

    def __init__(self, mesh: PlanMesh) -> None:
        self.mesh = mesh

    def build_plan(self, module: nn.Module) -> ShardingPlan:
        layouts = {name: (Shard(0),) * len(self.mesh.axes) for name, _ in module.named_parameters()}
        return ShardingPlan(mesh=self.mesh, plan=layouts)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.arange(8.0).reshape(4, 2).t(), requires_grad=False)


class Sum(nn.Module):
    """Two inputs by position or keyword, an option that is no tensor, and nested results."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, *, scale: float = 1.0) -> dict[str, object]:
        total = x * scale if other is None else x + other
        return {"total": total, "parts": (x, scale)}


def hand_written_plans(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    planned = PlanMesh.parse("dp=2,tp=2")
    torch.manual_seed(rank)
    _planner_example(mesh, planned)
    _megatron_mlp(mesh, planned)
    _ties(mesh, planned, rank)
    _ports_by_name(mesh, planned)
    _outputs_stay_dtensors_without_return_local_tensor(mesh, planned)


def _planner_example(mesh: DeviceMesh, planned: PlanMesh) -> None:
    module = Mlp()
    own = copy.deepcopy(module)
    apply_plan(module, mesh, ChunkAll(planned).build_plan(module))
    assert all(parameter.placements == (Shard(0), Shard(0)) for parameter in module.parameters())
    from_zero = [torch.zeros_like(own.fc1.weight) for _ in range(4)]
    torch.distributed.all_gather(from_zero, own.fc1.weight.detach())
    torch.testing.assert_close(module.fc1.weight.full_tensor().detach(), from_zero[0])
    # With src_data_rank=None each rank slices its own values.
    apply_plan(own_copy := copy.deepcopy(own), mesh, ChunkAll(planned).build_plan(own), src_data_rank=None)
    shard = own.fc1.weight.chunk(4)[mesh.get_rank()]
    torch.testing.assert_close(own_copy.fc1.weight.to_local(), shard)


def _megatron_mlp(mesh: DeviceMesh, planned: PlanMesh) -> None:
    torch.manual_seed(3)
    local = Mlp()
    sharded = copy.deepcopy(local)
    batch_split = (Shard(0), Replicate())
    plan = ShardingPlan(
        mesh=planned,
        plan={
            "fc1.weight": (Replicate(), Shard(0)),
            "fc1.bias": (Replicate(), Shard(0)),
            "fc2.weight": (Replicate(), Shard(1)),
            "fc2.bias": (Replicate(), Replicate()),
        },
        input_plan={"input": batch_split, "relu.input": (Shard(0), Shard(1))},
        output_plan={"fc2": batch_split, "relu.output": [(Shard(0), Shard(1))]},
        return_local_tensor=[""],
    )
    apply_plan(sharded, mesh, plan)
    seen: list[tuple[object, ...]] = []
    sharded.relu.register_forward_pre_hook(lambda _, args: seen.append(args[0].placements))
    x = torch.randn(4, 8)
    rows = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
    output = sharded(x[rows])
    assert seen == [(Shard(0), Shard(1))]
    assert type(output) is torch.Tensor
    torch.testing.assert_close(output, local(x)[rows])
    local(x).square().sum().backward()
    output.square().sum().backward()
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), local.get_parameter(name).grad)


def _ties(mesh: DeviceMesh, planned: PlanMesh, rank: int) -> None:
    module = Tied()
    frozen = module.frozen.detach().clone()
    apply_plan(
        module,
        mesh,
        ShardingPlan(mesh=planned, plan={"head.*": (Shard(0), Replicate()), "frozen": (Shard(1), Shard(0))}),
    )
    assert module.head.weight is module.embedding.weight
    assert module.head.weight.placements == (Shard(0), Replicate())
    assert not module.frozen.requires_grad
    torch.testing.assert_close(module.frozen.full_tensor(), frozen)


def _ports_by_name(mesh: DeviceMesh, planned: PlanMesh) -> None:
    split, whole = (Shard(0), Replicate()), (Replicate(), Replicate())
    x = torch.ones(2, 2)
    for spec in ({"x": split, "other": split}, {"0": split, "1": split}, [split, split]):
        module = apply_plan(Sum(), mesh, ShardingPlan(mesh=planned, input_plan={"input": spec}))
        for result in (module(x, x), module(x, other=x), module(other=x, x=x)):
            assert result["total"].placements == split
        assert module(x, None, scale=2.0)["total"].shape == (4, 2)
    plan = ShardingPlan(
        mesh=planned,
        input_plan={"": split},
        output_plan={"output": {"total": whole, "parts.0": split}},
        return_local_tensor=[""],
    )
    result = apply_plan(Sum(), mesh, plan)(x)
    assert type(result["total"]) is torch.Tensor
    assert result["total"].shape == (4, 2)
    assert result["parts"][0].shape == (2, 2)
    for wrong in ({"scale": split}, {"parts.1": split}, {"absent": split}):
        field = "input_plan" if "scale" in wrong else "output_plan"
        module = apply_plan(Sum(), mesh, ShardingPlan(mesh=planned, **{field: {"": wrong}}))
        with pytest.raises((TypeError, AttributeError), match=next(iter(wrong))):
            module(x, scale=2.0)


def _outputs_stay_dtensors_without_return_local_tensor(mesh: DeviceMesh, planned: PlanMesh) -> None:
    module = nn.Sequential(nn.ReLU(), nn.ReLU())
    plan = ShardingPlan(mesh=planned, output_plan={"0": (Shard(0), Shard(1))}, return_local_tensor=["1"])
    apply_plan(module, mesh, plan)
    assert isinstance(module[0](torch.ones(2, 1)), DTensor)
    # Unlike torch's, a local tensor keeps dims of size 1.
    assert module(torch.ones(2, 1)).shape == (2, 1)


def test_hand_written_plans_place_parameters_and_redistribute_at_boundaries() -> None:
    run_on_gloo(hand_written_plans, 4)
