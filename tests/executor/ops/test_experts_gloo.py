"""The experts op equals transformers' experts, in every combination of layouts that it covers, on real processes."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from support.executor_cases import MESH
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from cost_model.layouts.layout import format_layout
from executor.ops.experts import experts, replace_experts
from executor.redistribute import Redistributor
from planner.errors import PlanLayoutError
from planner.plan.sharding_plan import ShardingPlan

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 16, 8, 32, 8, 2
R, S0 = Replicate(), Shard(0)
SPLITS = {
    "nothing": (R, R, R),
    "tokens": (S0, R, R),
    "experts": (R, S0, S0),
    "inner": (R, _StridedShard(1, split_factor=2), Shard(2)),
    "tokens and experts": (S0, S0, S0),
}


def module_of_experts() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    config = transformers.MixtralConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    config._experts_implementation = "eager"
    part = transformers.models.mixtral.modeling_mixtral.MixtralExperts(config)
    for parameter in part.parameters():
        nn.init.normal_(parameter)
    return part


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(TOKENS, EXPERTS, generator=generator)
    scores[:, :4] = -100.0  # experts that no token chooses: with two ranks, all of the first
    weights, index = scores.softmax(-1).topk(CHOSEN, -1)
    return torch.randn(TOKENS, WIDTH, generator=generator), index, weights


def check_all(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
    redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=MESH))
    part = module_of_experts()
    plain = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs()]
    expected = part(*plain)
    gradient = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    expected.backward(gradient)
    gradients = [plain[0].grad, plain[2].grad, part.gate_up_proj.grad, part.down_proj.grad]
    wrong = []
    for names in itertools.product(SPLITS, repeat=2):
        tokens, up, down = zip(*(SPLITS[name] for name in names), strict=True)
        if names in (("inner",) * 2, ("tokens and experts",) * 2):
            continue  # two strided shards of one dim, which no plan has; two exchanges, which are an error
        arguments = [distribute_tensor(tensor, mesh, tokens) for tensor in inputs()]
        arguments += [distribute_tensor(part.gate_up_proj.detach(), mesh, up)]
        arguments += [distribute_tensor(part.down_proj.detach(), mesh, down)]
        arguments = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in arguments]
        actual = experts(redistributor, *arguments, "silu")
        if not torch.allclose(actual.full_tensor(), expected, rtol=1e-4, atol=1e-4):
            wrong.append(f"{names}: {format_layout(tuple(actual.placements))}")
        back = tuple(R if isinstance(place, Partial) else place for place in actual.placements)
        actual.backward(distribute_tensor(gradient, mesh, back))
        parts = ("hidden", "weights", "gate_up", "down")
        for name, tensor, reference in zip(parts, (arguments[0], *arguments[2:]), gradients, strict=True):
            if not torch.allclose(tensor.grad.full_tensor(), reference, rtol=1e-4, atol=1e-4):
                wrong.append(f"{names}: gradient of {name}, {format_layout(tuple(tensor.grad.placements))}")
    check_errors(redistributor, mesh, part)
    return wrong


def check_errors(redistributor: Redistributor, mesh: DeviceMesh, part: nn.Module) -> None:
    routing = [distribute_tensor(tensor, mesh, (R, R)) for tensor in inputs()]
    weights = [distribute_tensor(p.detach(), mesh, (R, Shard(1))) for p in part.parameters()]
    with pytest.raises(PlanLayoutError, match="SS\\(1,2\\)"):
        experts(redistributor, *routing, *weights, "silu")
    arguments = [
        distribute_tensor(tensor, mesh, (S0, S0))
        for tensor in (*inputs(), *map(torch.Tensor.detach, part.parameters()))
    ]
    with pytest.raises(PlanLayoutError, match="one axis at most"):
        experts(redistributor, *arguments, "silu")


def test_experts_equal_transformers_or_are_errors() -> None:
    assert run_on_gloo(check_all, 4) == [[]] * 4


def test_plain_experts_keep_their_forward() -> None:
    part = module_of_experts()
    replace_experts(part, None)
    assert "forward" not in vars(part)
