"""The experts op equals transformers' experts, in every combination of layouts that it covers, on real processes."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from support.executor_cases import MESH
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cost_model.layouts.layout import format_layout
from executor.ops.experts import experts, replace_experts
from executor.redistribute import Redistributor
from planner.errors import PlanLayoutError
from planner.model_rewrites.experts.modules import ExpertsModule, experts_in
from planner.model_rewrites.experts.placements import experts_placements
from planner.plan.sharding_plan import ShardingPlan

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 16, 8, 32, 8, 2
R = Replicate()
SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
ACTIVATIONS = {
    "mixtral": {"hidden_act": "silu"},
    "gpt_oss": SWIGLU,  # transposed, gate and up in turn, with biases and a gate of its own
    "openai_privacy_filter": SWIGLU,  # transposed, with biases and a gate of its own
    "aria": {"hidden_act": "silu"},  # transposed
    "nemotron_h": {"mlp_hidden_act": "relu2"},  # without a gate
    "minimax_m3_vl": SWIGLU,  # a gate of its own
}
"""Families of transformers -> what their configs say of the activation."""
SPLITS = ("nothing", "tokens", "experts", "inner", "tokens and experts")
"""What an axis shards, in the order of `experts_placements`."""


def module_of_experts(family: str) -> nn.Module:
    """Return a module of experts of transformers, with normally distributed weights and biases."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "moe_intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "moe_num_experts": EXPERTS,
    }
    config = SimpleNamespace(**sizes, moe_latent_size=None, **ACTIVATIONS[family], _experts_implementation="eager")
    models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    (experts_class,) = [value for name, value in vars(models).items() if name.endswith("Experts")]
    part = experts_class(config)
    for parameter in part.parameters():
        nn.init.normal_(parameter)
    return part


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(TOKENS, EXPERTS, generator=generator)
    scores[:, :4] = -100.0  # experts that no token chooses: with two ranks, all of the first
    weights, index = scores.softmax(-1).topk(CHOSEN, -1)
    return torch.randn(TOKENS, WIDTH, generator=generator), index, weights


def distributed(part: ExpertsModule, mesh: DeviceMesh, names: Sequence[str]) -> list[DTensor]:
    """Return the op's inputs, with what ``names`` say sharded on the axes."""
    known = experts_placements(part.form)
    places = [known[SPLITS.index(name)] for name in names]
    weights = [tensor.detach() for tensor in part.parameters if tensor is not None]
    layouts = [[place.tokens for place in places]] * 3 + [
        [place.weights[position] for place in places] for position in range(len(weights))
    ]
    return [
        distribute_tensor(tensor, mesh, layout).requires_grad_(tensor.is_floating_point())
        for tensor, layout in zip((*inputs(), *weights), layouts, strict=True)
    ]


def check_all(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
    redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=MESH))
    wrong = []
    for family in ACTIVATIONS:
        wrong += check_family(family, mesh, redistributor)
    check_errors(redistributor, mesh, *experts_in(module_of_experts("mixtral")))
    return wrong


def check_family(family: str, mesh: DeviceMesh, redistributor: Redistributor) -> list[str]:
    module = module_of_experts(family)
    (part,) = experts_in(module)
    plain = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs()]
    expected = module(*plain)
    gradient = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    expected.backward(gradient)
    weights = [tensor for tensor in part.parameters if tensor is not None]
    gradients = [plain[0].grad, None, plain[2].grad, *(tensor.grad for tensor in weights)]
    wrong = []
    for names in itertools.product(SPLITS, repeat=2):
        if names in (("inner",) * 2, ("tokens and experts",) * 2):
            continue  # two strided shards of one dim, which no plan has; two exchanges, which are an error
        arguments = distributed(part, mesh, names)
        actual = experts(redistributor, *arguments, form=part.form, activation=part.activation)
        if not torch.allclose(actual.full_tensor(), expected, rtol=1e-4, atol=1e-4):
            wrong.append(f"{family}, {names}: {format_layout(tuple(actual.placements))}")
        back = tuple(R if isinstance(place, Partial) else place for place in actual.placements)
        actual.backward(distribute_tensor(gradient, mesh, back))
        for position, (tensor, reference) in enumerate(zip(arguments, gradients, strict=True)):
            if reference is None:
                continue
            if not torch.allclose(tensor.grad.full_tensor(), reference, rtol=1e-4, atol=1e-4):
                layout = format_layout(tuple(tensor.grad.placements))
                wrong.append(f"{family}, {names}: gradient of input {position}, {layout}")
    return wrong


def check_errors(redistributor: Redistributor, mesh: DeviceMesh, part: ExpertsModule) -> None:
    routing = [distribute_tensor(tensor, mesh, (R, R)) for tensor in inputs()]
    weights = [distribute_tensor(p.detach(), mesh, (R, Shard(1))) for p in part.module.parameters()]
    with pytest.raises(PlanLayoutError, match="SS\\(1,2\\)"):
        experts(redistributor, *routing, *weights, form=part.form)
    with pytest.raises(PlanLayoutError, match="one axis at most"):
        experts(redistributor, *distributed(part, mesh, ["tokens and experts"] * 2), form=part.form)


def test_experts_equal_transformers_or_are_errors() -> None:
    assert run_on_gloo(check_all, 4) == [[]] * 4


@pytest.mark.parametrize("family", ACTIVATIONS)
def test_activations_that_the_op_computes_itself(family: str) -> None:
    ((_, form),) = experts_in(module_of_experts(family))
    assert (form.activation == "silu") == (family in ("mixtral", "aria"))
    assert form.alternating == (family == "gpt_oss")
    assert form.gated == (family != "nemotron_h")


def test_plain_experts_keep_their_forward() -> None:
    part = module_of_experts("mixtral")
    replace_experts(part, None)
    assert "forward" not in vars(part)
