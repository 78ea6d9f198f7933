"""``parallelize_module`` as torch's own tests demand it, case by case, on four processes.

The cases are those of torch's ``test_parallelize_api.py``. What differs:

- ``empty_plan``: torch warns and does nothing. Here a call without styles plans, or says that it needs inputs.
- Cases of experts apply styles of the test's own, on meshes of two axes, and need GPUs.
  One case here runs such a style.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.case_table import named
from support.gloo import run_on_gloo
from support.tp_styles import ALL_GATHERED, RANKS, Mlp, close, equal_steps, parallelized, run_on_one_axis
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
)

from executor import local_micro_batches, parallelize_module, plan_of
from planner.errors import KeyConflictError, MeshError, PlannerError, PlanTypeError
from planner.imported.parallel_styles import plan_from_styles
from planner.plan.sharding_plan import PlanMesh, ShardingPlan


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def case_two_columnwise_layers(mesh: DeviceMesh) -> None:
    local = Mlp()
    sharded = parallelized(local, mesh, {"net1": ALL_GATHERED, "net2": ALL_GATHERED})
    assert sharded.net2.weight.placements == (Shard(0),)
    assert sharded.net2.weight.to_local().shape == (3 if mesh.get_rank() < 3 else 1, 16)
    equal_steps(local, sharded, torch.randn(12, 10))


def case_nested_names(mesh: DeviceMesh) -> None:
    local = nn.Sequential()
    local.add_module("encoder", Mlp())
    styles = {"encoder.net1": ColwiseParallel(), "encoder.net2": RowwiseParallel()}
    equal_steps(local, parallelized(local, mesh, styles), torch.randn(12, 10))


def case_a_rowwise_root_gets_its_columns(mesh: DeviceMesh) -> None:
    local = nn.Linear(16, 10)
    sharded = parallelized(local, mesh, RowwiseParallel())
    equal_steps(local, sharded, torch.randn(9, 16), lambda x: x.chunk(RANKS, dim=-1)[mesh.get_rank()])


def case_a_columnwise_root(mesh: DeviceMesh) -> None:
    local = nn.Linear(10, 16)
    equal_steps(local, parallelized(local, mesh, ALL_GATHERED), torch.randn(2, 8, 10))


def case_columns_that_ranks_do_not_divide(mesh: DeviceMesh) -> None:
    local = nn.Sequential(nn.Linear(10, 17), nn.ReLU(), nn.Linear(17, 9))
    sharded = parallelized(local, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
    equal_steps(local, sharded, torch.randn(12, 10))


def case_embeddings_by_rows_and_by_columns(mesh: DeviceMesh) -> None:
    local = nn.ModuleDict({"rows": nn.Embedding(10, 6), "columns": nn.Embedding(7, 6, padding_idx=0)})
    styles = {"rows": RowwiseParallel(input_layouts=Replicate()), "columns": ALL_GATHERED}
    sharded = parallelized(local, mesh, styles)
    ids = torch.tensor([[0, 1, 6], [5, 6, 0]])
    for name, table in local.items():
        expected, output = table(ids), sharded[name](ids)
        close(output, expected)
        expected.square().sum().backward()
        output.square().sum().backward()
        close(sharded[name].weight.grad, table.weight.grad)


def case_an_input_is_gathered(mesh: DeviceMesh) -> None:
    style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    module = parallelize_module(Same(), mesh, style)
    x = torch.randn(5, 7) + mesh.get_rank()
    output = module(x)
    assert isinstance(output, DTensor)
    assert output.shape == (20, 7)
    close(output.redistribute(placements=[Shard(0)]).to_local(), x)


def case_an_input_becomes_local(mesh: DeviceMesh) -> None:
    style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
    output = parallelize_module(Same(), mesh, style)(torch.full((1, 2), float(mesh.get_rank())))
    assert type(output) is torch.Tensor
    close(output, torch.arange(4.0).unsqueeze(1).expand(4, 2))


def case_an_input_by_keyword(mesh: DeviceMesh) -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, scale: float, *, other: torch.Tensor) -> torch.Tensor:
            return x * scale + other

    style = PrepareModuleInput(
        input_layouts=(Shard(0), None),
        desired_input_layouts=(Replicate(), None),
        input_kwarg_layouts={"other": Shard(0)},
        desired_input_kwarg_layouts={"other": Replicate()},
    )
    x = torch.full((1, 2), float(mesh.get_rank()))
    output = parallelize_module(Add(), mesh, style)(x, 2.0, other=x)
    close(output, 3 * torch.arange(4.0).unsqueeze(1).expand(4, 2))


def case_an_output_is_split(mesh: DeviceMesh) -> None:
    style = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    module = parallelize_module(Same(), mesh, style)
    x = torch.randn(16, 7)
    for given in (x, distribute_tensor(x, mesh, [Replicate()])):
        close(module(given), x.chunk(RANKS)[mesh.get_rank()])


def case_one_of_two_outputs(mesh: DeviceMesh) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x + 1

    style = PrepareModuleOutput(
        output_layouts=(None, Replicate()), desired_output_layouts=(None, Shard(0)), use_local_output=False
    )
    x = torch.randn(8, 2)
    first, second = parallelize_module(Two(), mesh, style)(x)
    assert type(first) is torch.Tensor
    assert second.placements == (Shard(0),)
    close(second, x + 1)


def case_input_and_output_with_seven_columns_on_four_ranks(mesh: DeviceMesh) -> None:
    style = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
    )
    x = torch.randn(5, 7) + mesh.get_rank()
    gathered = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    expected = gathered.redistribute(placements=[Shard(1)]).to_local()
    output = parallelize_module(Same(), mesh, style)(x)
    assert output.shape == (20, 2 if mesh.get_rank() < 3 else 1)
    close(output, expected)


def case_patterns(mesh: DeviceMesh) -> None:
    local = Mlp()
    for pattern in ("net*", "net?", "net[1-2]", "n*[12]"):
        equal_steps(copy.deepcopy(local), parallelized(local, mesh, {pattern: ALL_GATHERED}), torch.randn(12, 10))


def case_patterns_of_several_components(mesh: DeviceMesh) -> None:
    local = Stack()
    styles = {"layers.*.net[1]": ColwiseParallel(), "layers.[0-2].net2": RowwiseParallel()}
    equal_steps(local, parallelized(local, mesh, styles), torch.randn(12, 10))


def case_values_of_the_source_rank(mesh: DeviceMesh) -> None:
    torch.manual_seed(mesh.get_rank())
    local = Mlp()
    sharded = parallelized(local, mesh, {"net*": ALL_GATHERED}, src_data_rank=1)
    for name, parameter in local.named_parameters():
        values = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=1).to_local()
        close(sharded.get_parameter(name), values)
    with CommDebugMode() as counter:
        own = parallelized(local, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()}, src_data_rank=None)
    assert counter.get_total_counts() == 0
    close(own.net1.weight.to_local(), local.net1.weight.chunk(RANKS)[mesh.get_rank()])


def case_a_style_for_the_root(mesh: DeviceMesh) -> None:
    local = Mlp()
    styles = {
        "": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(0),
            output_layouts=Shard(0),
            desired_output_layouts=Replicate(),
        ),
        "net1": ColwiseParallel(input_layouts=Shard(0)),
        "net2": RowwiseParallel(output_layouts=Shard(0)),
    }
    equal_steps(local, parallelized(local, mesh, styles), torch.randn(16, 10))


def case_keys_that_match_nothing_warn(mesh: DeviceMesh) -> None:
    local = Mlp()
    styles = {"net0.a.b": ColwiseParallel(), "net1": ColwiseParallel(), "net2": RowwiseParallel()}
    with pytest.warns(UserWarning, match="net0.a.b"):
        sharded = parallelized(local, mesh, styles)
    equal_steps(local, sharded, torch.randn(16, 10))


def case_the_mesh_of_the_context(mesh: DeviceMesh) -> None:
    local = nn.Linear(10, 16)
    with mesh:
        sharded = parallelize_module(copy.deepcopy(local), parallelize_plan=ALL_GATHERED)
    equal_steps(local, sharded, torch.randn(8, 10))
    with pytest.raises(MeshError, match="device mesh"):
        parallelize_module(local, parallelize_plan=ALL_GATHERED)


class Halved(ParallelStyle):
    """A style of the user's own: it halves a module's results."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _, args, output: output / 2)
        return module


def case_a_style_of_ones_own(mesh: DeviceMesh) -> None:
    local = Mlp()
    sharded = parallelized(local, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel(), "relu": Halved()})
    local.relu.register_forward_hook(lambda _, args, output: output / 2)
    equal_steps(local, sharded, torch.randn(8, 10))
    close(parallelize_module(Same(), mesh, Halved())(torch.ones(2)), torch.full((2,), 0.5))


def case_the_plan_is_saved_and_read(mesh: DeviceMesh) -> None:
    styles = {"net1": ColwiseParallel(), "net2": RowwiseParallel(output_layouts=Shard(0))}
    plan = plan_from_styles(Mlp(), PlanMesh.parse("tp=4"), styles).plan
    assert ShardingPlan.from_dict(plan.to_dict()) == plan


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.mlp(x), y)


def case_no_styles_are_planned(mesh: DeviceMesh) -> None:
    local = Regression()
    inputs = (torch.randn(16, 10), torch.randn(16, 10))
    sharded = parallelize_module(copy.deepcopy(local), mesh, example_inputs=inputs, micro_batches=1)
    plan = plan_of(sharded)
    assert plan.mesh.shape == (RANKS,)
    (part,) = local_micro_batches(sharded, inputs)
    expected, loss = local(*inputs), sharded(*part)
    close(loss, expected)
    expected.backward()
    loss.backward()
    for name, parameter in local.named_parameters():
        close(sharded.get_parameter(name).grad, parameter.grad, name)


def case_no_styles_and_no_inputs(mesh: DeviceMesh) -> None:
    with pytest.raises(PlannerError, match="example_inputs"):
        parallelize_module(nn.Linear(10, 16), mesh)
    with pytest.raises(TypeError, match="example_inputs without a parallelize_plan"):
        parallelize_module(nn.Linear(10, 16), mesh, ALL_GATHERED, example_inputs=(torch.ones(2, 10),))


def case_what_is_wrong_is_said(mesh: DeviceMesh) -> None:
    with pytest.raises(PlanTypeError, match=r"ColwiseParallel for 'relu'.*ReLU"):
        parallelize_module(Mlp(), mesh, {"relu": ColwiseParallel()})
    with pytest.raises(PlanTypeError, match="str for 'net1'"):
        parallelize_module(Mlp(), mesh, {"net1": "colwise"})
    with pytest.raises(KeyConflictError, match=r"'net\*' and 'net1'"):
        parallelize_module(Mlp(), mesh, {"net*": ColwiseParallel(), "net1": RowwiseParallel()})
    with pytest.raises(MeshError, match="one axis"):
        parallelize_module(Mlp(), init_device_mesh("cpu", (2, 2)), {"net1": ColwiseParallel()})


CASES = named(globals())


def every_case(rank: int) -> dict[str, str]:
    return run_on_one_axis(CASES)


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    return run_on_gloo(every_case, RANKS)


@pytest.mark.parametrize("case", CASES)
def test_torchs_calls_run_unchanged(case: str, results: list[dict[str, str]]) -> None:
    assert "\n".join(rank[case] for rank in results).strip() == ""
