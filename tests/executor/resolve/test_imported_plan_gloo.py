"""Plans of ``torch.distributed._shard`` and HyperParallel run with a changed import alone, on four processes.

The cases of torch's ``test_sharding_plan.py`` and ``test_sharder.py`` are here. What differs:

- A sharded parameter is a DTensor, not a ``ShardedTensor``; a layer's result is one where torch has no sharded op.
- A Sharder's module takes the place of the original. In torch it is stored under another name, and the original runs.
- ``return_local_tensor`` keeps a dim of size 1, so that the number of dims does not depend on the number of ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._shard.sharding_plan as torch_plans
from support.case_table import named, run_cases
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed._shard.sharder import Sharder as TorchSharder
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import executor
from executor import shard_module
from planner import ShardingPlan, ShardingPlanner
from planner.errors import MeshError, PlanLayoutError, PlanMismatchError
from planner.plan.mesh import PlanMesh

RANKS = 4
DEVICES = [f"rank:{rank}/cpu" for rank in range(RANKS)]


def rows() -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=0, placements=list(DEVICES))


def columns() -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=1, placements=list(DEVICES))


class Mlp(nn.Module):
    """Layers of sizes that four ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.gelu, self.fc2 = nn.Linear(17, 12), nn.GELU(), nn.Linear(12, 29)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.gelu(self.fc1(x)))


class ChunkAll(torch_plans.ShardingPlanner):
    """torch's planner, with torch's plan."""

    def build_plan(self, module: nn.Module) -> torch_plans.ShardingPlan:
        return torch_plans.ShardingPlan(plan={name: rows() for name, _ in module.named_parameters()})


class ChunkAllOfOurs(ShardingPlanner):
    """The same planner after its import was changed."""

    def build_plan(self, module: nn.Module) -> ShardingPlan:
        return ShardingPlan(plan={name: rows() for name, _ in module.named_parameters()})


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def case_values_of_wrong_types() -> None:
    for make in (torch_plans.ShardingPlan, ShardingPlan):
        for plan in (
            make({"fc1.weight": torch.randn(3, 4)}, {"": rows()}),
            make({"fc1.weight": rows()}, {"": torch.randn(3, 4)}),
        ):
            with pytest.raises(TypeError, match="Tensor for"):
                shard_module(Mlp(), plan)
        for key in ("fc3.weight", "fc1.biass"):
            with pytest.raises(AttributeError, match="no attribute"):
                shard_module(Mlp(), make(plan={key: rows()}))
    with pytest.raises(TypeError, match="int as its plan"):
        shard_module(Mlp(), 3)


def case_planners_of_torch() -> None:
    for planner in (ChunkAll(), ChunkAllOfOurs()):
        assert isinstance(planner, torch_plans.ShardingPlanner)
        local = Mlp()
        sharded = copy.deepcopy(local)
        shard_module(sharded, planner.build_plan(sharded))
        assert {type(parameter) for parameter in sharded.parameters()} == {DTensor}
        assert sharded.fc2.weight.to_local().shape == ((8, 8, 8, 5)[dist.get_rank()], 12)
        for optimizer in (torch.optim.SGD(module.parameters(), lr=0.1) for module in (local, sharded)):
            optimizer.zero_grad()
        x = torch.randn(3, 17)
        expected, output = local(x), sharded(x)
        close(output, expected)
        expected.square().sum().backward()
        output.square().sum().backward()
        for name, parameter in local.named_parameters():
            gradient = sharded.get_parameter(name).grad
            assert gradient.placements == (Shard(0),)
            close(gradient, parameter.grad)


def case_outputs_become_local_tensors() -> None:
    local = Mlp()
    sharded = copy.deepcopy(local)
    plan = torch_plans.ShardingPlan({"fc1.weight": rows(), "fc2.weight": columns()}, {"fc2": rows()}, ["fc2"])
    shard_module(sharded, plan)
    x = torch.randn(6, 17)
    output = sharded(x)
    assert type(output) is torch.Tensor
    assert output.shape == ((2, 2, 2, 0)[dist.get_rank()], 29)
    close(output, local(x)[2 * dist.get_rank() :][:2])


def case_a_process_group() -> None:
    group = dist.new_group([2, 3])
    placements: list[Any] = ["rank:2/cpu", "rank:3/cpu"]
    plan = torch_plans.ShardingPlan(
        plan={"fc1.weight": ChunkShardingSpec(0, placements), "fc2.weight": ChunkShardingSpec(1, list(placements))}
    )
    torch.manual_seed(dist.get_rank())
    local = Mlp()
    sharded = copy.deepcopy(local)
    if dist.get_rank() < 2:
        with pytest.raises(PlanMismatchError, match="not in the process group"):
            shard_module(sharded, plan, process_group=group)
    else:
        shard_module(sharded, plan, src_rank=1, process_group=group)
        x = torch.ones(2, 17)
        full = [torch.zeros_like(local.fc1.weight) for _ in range(2)]
        dist.all_gather(full, local.fc1.weight.detach(), group=group)
        close(sharded.fc1.weight.detach(), full[1])
        assert sharded.fc1.weight.to_local().shape == (6, 17)
        assert sharded(x).shape == (2, 29)
    with pytest.raises(PlanLayoutError, match=r"ranks \[2, 3\]"):
        shard_module(Mlp(), plan)
    with pytest.raises(PlanLayoutError, match="twice"):
        shard_module(Mlp(), ShardingPlan({"fc1.weight": ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/cpu"])}))


class Bags(nn.Module):
    """Bags of embeddings: indices [batch, bag] -> [bags * batch, columns]."""

    def __init__(self, bags: int, rows: int, columns: int) -> None:
        super().__init__()
        self.bags = nn.ModuleDict({f"bag_{i}": nn.EmbeddingBag(rows, columns, mode="sum") for i in range(bags)})

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.cat([bag(indices) for bag in self.bags.values()])


class BagSharder(TorchSharder):
    """Shards the first bags by rows, the others by columns, each in a call of its own."""

    def shard(self, module: nn.Module) -> nn.Module:
        if not isinstance(module, Bags):
            raise TypeError("bags only")
        for index, name in enumerate(module.bags):
            spec = rows() if index < RANKS // 2 else columns()
            shard_module(module, plan=ShardingPlan(plan={f"bags.{name}.weight": spec}))
        sharded = Bags(0, 1, 1)
        sharded.bags = module.bags
        return sharded


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = Bags(10, 10, 8)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.ebc(indices)


def case_a_sharder_of_bags() -> None:
    for make in (torch_plans.ShardingPlan, ShardingPlan):
        local = Model()
        sharded = copy.deepcopy(local)
        shard_module(sharded, make(plan={"ebc": BagSharder()}))
        assert sharded.ebc is not local.ebc
        tables = [bag.weight for bag in sharded.ebc.bags.values()]
        assert [table.placements for table in tables] == [(Shard(0),)] * 2 + [(Shard(1),)] * 8
        assert tables[0].to_local().shape == ((3, 3, 3, 1)[dist.get_rank()], 8)
        ids = torch.arange(8).reshape(2, 4)
        expected, output = local(ids), sharded(ids)
        assert type(output) is torch.Tensor
        close(output, expected)
        # As in torch, every rank looks up its own batch, so that the gradients of the ranks' losses add up.
        expected.square().sum().backward()
        output.square().sum().backward()
        for name, parameter in local.named_parameters():
            close(sharded.get_parameter(name).grad, RANKS * parameter.grad)


def case_every_rank_looks_up_its_own_batch() -> None:
    tables = nn.ModuleDict({"bag": nn.EmbeddingBag(10, 6), "embedding": nn.Embedding(7, 6)})
    ids = torch.tensor([[0, 3, 3], [6, 5, dist.get_rank()]])
    for spec in (rows(), columns()):
        sharded = copy.deepcopy(tables)
        shard_module(sharded, torch_plans.ShardingPlan({"bag.weight": spec, "embedding.weight": spec}))
        for name, table in tables.items():
            output = sharded[name](ids)
            assert type(output) is torch.Tensor
            close(output, table(ids))


def case_flat_indices_of_a_rank_are_refused() -> None:
    bag = nn.EmbeddingBag(10, 6)
    shard_module(bag, ShardingPlan({"weight": rows()}))
    with pytest.raises(PlanLayoutError, match="1 dims"):
        bag(torch.arange(6), torch.tensor([0, 3]))


def case_sharders_in_wrong_places() -> None:
    with pytest.raises(KeyError, match="must not be empty"):
        shard_module(Bags(1, 10, 8), torch_plans.ShardingPlan({"": BagSharder()}))
    plan = torch_plans.ShardingPlan({"bags.bag_0.weight": rows(), "bags": BagSharder()})
    with pytest.raises(RuntimeError, match="should not conflict with the submodule tree"):
        shard_module(Bags(1, 10, 8), plan)
    # A name that only begins as the Sharder's does is no conflict.
    model = nn.ModuleDict({"emb": Bags(1, 10, 8), "emb2": nn.Linear(4, 4)})
    shard_module(model, torch_plans.ShardingPlan({"emb": BagSharder(), "emb2.weight": rows()}))
    assert model["emb2"].weight.placements == (Shard(0),)


def case_a_module_inside_another() -> None:
    local = nn.Sequential(Mlp(), nn.ReLU(), nn.Linear(29, 5))
    sharded = copy.deepcopy(local)
    shard_module(sharded[0], ShardingPlan({"fc1.weight": rows(), "fc1.bias": rows()}))
    shard_module(sharded, ShardingPlan({"2.weight": rows(), "2.bias": rows()}))
    with pytest.raises(PlanMismatchError, match="DTensor already"):
        shard_module(sharded, ShardingPlan({"0.fc1.weight": rows()}))
    x = torch.randn(3, 17)
    for _ in range(2):
        expected, output = local(x), sharded(x)
        close(output, expected)
        expected.square().sum().backward()
        output.square().sum().backward()
    for name, parameter in local.named_parameters():
        close(sharded.get_parameter(name).grad, parameter.grad)


def case_hyperparallels_plans() -> None:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    local = Mlp()
    x = torch.randn(3, 17)
    for key in ("output", ""):
        sharded = copy.deepcopy(local)
        plan = ShardingPlan(
            plan={"fc1.weight": Shard(0), "fc1.bias": Shard(0), "fc2.weight": (Shard(1),)},
            input_plan={"input": Replicate()},
            output_plan={"output": Replicate()},
            return_local_tensor=[key],
        )
        shard_module(sharded, device_mesh=mesh, sharding_plan=plan)
        output = sharded(x)
        assert type(output) is torch.Tensor
        close(output, local(x))
    with pytest.raises(PlanLayoutError, match="1 placement"):
        shard_module(Mlp(), init_device_mesh("cpu", (2, 2)), ShardingPlan({"fc1.weight": Shard(0)}))
    with pytest.raises(MeshError, match="names no mesh"):
        ShardingPlan({"fc1.weight": Shard(0)}).save("plan.json")


def case_our_own_plan_brings_its_mesh() -> None:
    plan = ShardingPlan({"fc2.weight": (Replicate(), Shard(1))}, mesh=PlanMesh.parse("dp=2,tp=2"))
    plan = ShardingPlan.from_dict({**plan.to_dict(), "mesh": {"names": ["dp", "tp"], "shape": [2, 2], "device": "cpu"}})
    module = shard_module(Mlp(), plan)
    assert module.fc2.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert module.fc2.weight.to_local().shape == (29, 6)


CASES = named(globals())


def every_case(rank: int) -> dict[str, str]:
    return run_cases(CASES)


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    return run_on_gloo(every_case, RANKS)


@pytest.mark.parametrize("case", CASES)
def test_the_seeds_calls_run_unchanged(case: str, results: list[dict[str, str]]) -> None:
    assert "\n".join(rank[case] for rank in results).strip() == ""


def test_one_signature_is_shown() -> None:
    assert executor.shard_module.__name__ == "shard_module"
    assert "device_mesh" in executor.shard_module.__wrapped__.__annotations__
