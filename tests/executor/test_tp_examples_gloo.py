"""Models trained under styles of `parallelize_module`, as torch's ``test_tp_examples.py`` demands, on four processes.

What differs from torch:

- ``transformer_training``: torch counts 30 all-reduces in the optimizer's step under sequence parallelism, because the
  gradients of norms stay partial. Here the backward has reduced them. The cases with float64 are left out: a plan
  computes in one of the dtypes of a job, which are fp32, bf16 and fp16.
- ``mlp_training`` with recomputed activations is switched off in torch too.
- ``loss_parallel`` is torch's context for DTensors, outside of the sharded module; the cases on two axes test its
  handlers alone and call nothing of ours. One case runs it on the logits of a sharded module.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.case_table import named
from support.gloo import run_on_gloo
from support.tp_styles import (
    RANKS,
    Mlp,
    all_gather,
    all_reduce,
    close,
    equal_steps,
    parallelized,
    reduce_scatter,
    run_on_one_axis,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)

from executor import parallelize_module


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


CASES = named(globals())


def every_case(rank: int) -> dict[str, str]:
    return run_on_one_axis(CASES)


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    return run_on_gloo(every_case, RANKS)


@pytest.mark.parametrize("case", CASES)
def test_torchs_calls_run_unchanged(case: str, results: list[dict[str, str]]) -> None:
    assert "\n".join(rank[case] for rank in results).strip() == ""
