"""``parallelize_module`` as torch's own tests demand it, case by case, on four processes.

The cases are those of torch's ``test_parallelize_api.py`` and ``test_tp_examples.py``. What differs:

- ``empty_plan``: torch warns and does nothing. Here a call without styles plans, or says that it needs inputs.
- ``transformer_training``: torch counts 30 all-reduces in the optimizer's step under sequence parallelism, because the
  gradients of norms stay partial. Here the backward has reduced them. The cases with float64 are left out: a plan
  computes in one of the dtypes of a job, which are fp32, bf16 and fp16.
- ``mlp_training`` with recomputed activations is switched off in torch too.
- ``loss_parallel`` is torch's context for DTensors, outside of the sharded module; the cases on two axes test its
  handlers alone and call nothing of ours. One case runs it on the logits of a sharded module.
- Cases of experts apply styles of the test's own, on meshes of two axes, and need GPUs.
  One case here runs such a style.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.case_table import named, run_cases
from support.gloo import run_on_gloo
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
    SequenceParallel,
    loss_parallel,
)

from executor import local_micro_batches, parallelize_module, plan_of
from planner.errors import KeyConflictError, MeshError, PlannerError, PlanTypeError
from planner.imported.parallel_styles import plan_from_styles
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

RANKS = 4
ALL_GATHERED = ColwiseParallel(output_layouts=Replicate())
all_reduce = torch.ops.c10d_functional.all_reduce
all_gather = torch.ops.c10d_functional.all_gather_into_tensor
reduce_scatter = torch.ops.c10d_functional.reduce_scatter_tensor


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


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


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Check that two tensors are equal to 1e-5; elements near zero to 1e-5 of the largest."""
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        whole(actual), expected, rtol=1e-5, atol=1e-5 * scale, msg=lambda text: f"{what}: {text}"
    )


def equal_steps(
    local: nn.Module, sharded: nn.Module, x: torch.Tensor, own: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> None:
    """Check the results, gradients and parameters of two steps against the unsharded module's."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.25) for module in (local, sharded)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, output = local(x), sharded(own(x))
        close(output, expected, "output")
        expected.square().sum().backward()
        whole(output).square().sum().backward()
        for name, parameter in local.named_parameters():
            close(sharded.get_parameter(name).grad, parameter.grad, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in local.named_parameters():
            close(sharded.get_parameter(name), parameter, name)


def parallelized(local: nn.Module, mesh: DeviceMesh, styles: object, **options: object) -> nn.Module:
    return parallelize_module(copy.deepcopy(local), mesh, styles, **options)


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


def case_training_by_columns_and_rows(mesh: DeviceMesh) -> None:
    local = Mlp()
    sharded = parallelized(local, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    x = torch.randn(8, 10)
    with CommDebugMode() as counter:
        sharded(x).sum().backward()
    assert counter.get_comm_counts() == {all_reduce: 1}
    sharded.zero_grad()
    equal_steps(local, sharded, x)


def case_training_with_a_split_batch(mesh: DeviceMesh) -> None:
    local = Mlp()
    styles = {"net1": ColwiseParallel(input_layouts=Shard(0)), "net2": RowwiseParallel(output_layouts=Shard(0))}
    sharded = parallelized(local, mesh, styles)
    x = torch.randn(32, 10)
    mine = x.chunk(RANKS)[mesh.get_rank()]
    with CommDebugMode() as counter:
        output = sharded(mine)
        output.square().sum().backward()
    counts = counter.get_comm_counts()
    assert (counts[all_gather], counts[reduce_scatter]) == (2, 1)
    expected = local(x)
    close(output, expected.chunk(RANKS)[mesh.get_rank()])
    expected.square().sum().backward()
    for name, parameter in local.named_parameters():
        close(sharded.get_parameter(name).grad, parameter.grad, name)


def case_inference(mesh: DeviceMesh) -> None:
    local = Mlp()
    sharded = parallelized(local, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    with torch.inference_mode():
        x = torch.randn(8, 10)
        close(sharded(x), local(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = (layer(x).view(batch, seq, -1, self.head).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        values = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(values.transpose(1, 2).reshape(batch, seq, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, *, tied: bool, vocabulary: int = 8, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(2)])
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def split_transformer(model: Transformer, mesh: DeviceMesh, *, sequence: bool, local: bool, tied: bool) -> Transformer:
    """Call parallelize_module for the root, for each layer and for the output, as torch's example does."""
    pieces: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1) if sequence else Replicate()),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0) if sequence else Replicate()),
    }
    whole_input = Shard(1) if sequence else Replicate()
    if sequence:
        pieces["norm"] = SequenceParallel()
    parallelize_module(model, mesh, pieces)
    for layer in model.layers:
        styles: dict[str, ParallelStyle] = {
            "attention.w[qkv]": ColwiseParallel(use_local_output=local),
            "attention.wo": RowwiseParallel(output_layouts=whole_input),
            "up": ColwiseParallel(input_layouts=whole_input),
            "down": RowwiseParallel(output_layouts=whole_input),
        }
        if sequence:
            styles["attention"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            styles |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        parallelize_module(layer, mesh, styles)
    parallelize_module(model.output, mesh, ColwiseParallel(input_layouts=whole_input, output_layouts=Replicate()))
    if tied:
        model.output.weight = model.tokens.weight
    return model


def transformer(mesh: DeviceMesh, *, sequence: bool, local: bool, tied: bool, trained: tuple[str, ...] = ()) -> None:
    reference = Transformer(tied=tied)
    sharded = split_transformer(copy.deepcopy(reference), mesh, sequence=sequence, local=local, tied=tied)
    if trained:
        for model in (reference, sharded):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in trained)
    ids = torch.randint(8, (8, 8))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.25) for model in (reference, sharded)]
    expected, output = reference(ids), sharded(ids)
    close(output, expected)
    expected.square().sum().backward()
    output.square().sum().backward()
    for name, parameter in reference.named_parameters():
        other = sharded.get_parameter(name).grad
        assert (parameter.grad is None) == (other is None), name
        if parameter.grad is not None:
            close(other, parameter.grad, name)
    with CommDebugMode() as counter:
        for optimizer in optimizers:
            optimizer.step()
    assert counter.get_total_counts() == 0, "gradients are reduced before the optimizer's step"


def case_transformer(mesh: DeviceMesh) -> None:
    transformer(mesh, sequence=False, local=True, tied=True)


def case_transformer_of_dtensor_heads(mesh: DeviceMesh) -> None:
    transformer(mesh, sequence=False, local=False, tied=True)


def case_transformer_with_a_split_sequence(mesh: DeviceMesh) -> None:
    transformer(mesh, sequence=True, local=False, tied=True)


def case_transformer_with_frozen_parameters(mesh: DeviceMesh) -> None:
    names = ("output.weight", "norm.weight", "norm.bias")
    one_block = ("layers.1.norm2.weight", "layers.1.norm2.bias")
    varied = ("layers.0.attention.wv.weight", "layers.0.up.bias", "layers.1.norm2.bias", "layers.1.down.weight")
    for trained in (names, ("tokens.weight", "output.weight"), ("tokens.weight", *names, *one_block), varied):
        torch.manual_seed(0)
        transformer(mesh, sequence=True, local=False, tied=False, trained=trained)


def case_weights_tied_afterwards(mesh: DeviceMesh) -> None:
    local = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    sharded = parallelized(local, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for model in (local, sharded):
        model[1].weight = model[0].weight
    assert sharded[1].weight is sharded[0].weight
    ids = torch.randint(16, (5,))
    expected, output = local(ids), sharded(ids)
    close(output, expected)
    expected.square().sum().backward()
    output.square().sum().backward()
    close(sharded[0].weight.grad, local[0].weight.grad)


def case_a_parallel_loss_of_split_logits(mesh: DeviceMesh) -> None:
    local = nn.Linear(10, 16)
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    sharded = parallelized(local, mesh, style)
    x, labels = torch.randn(8, 10), torch.randint(16, (8,))
    expected = F.cross_entropy(local(x), labels)
    expected.backward()
    with loss_parallel():
        loss = F.cross_entropy(sharded(x), labels)
        loss.backward()
    close(loss, expected)
    close(sharded.weight.grad, local.weight.grad)


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
    warnings.simplefilter("error")
    # Of CommDebugMode, where the inputs need no gradient.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    return run_cases(CASES, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)))


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    return run_on_gloo(every_case, RANKS)


@pytest.mark.parametrize("case", CASES)
def test_torchs_calls_run_unchanged(case: str, results: list[dict[str, str]]) -> None:
    assert "\n".join(rank[case] for rank in results).strip() == ""
