"""Fused ops equal the chains of ops that they replace, in every combination of layouts that they cover, and models with
them have the unsharded model's loss and gradients; on real processes, in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.executor_cases import MESH
from support.families import make
from support.gloo import run_on_gloo
from support.side_by_side import train_all
from support.split_inputs import Inputs, close, layouts, leaf
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from cost_model.layouts.layout import format_layout
from executor.ops.fused import fused_cross_entropy, gated, gated_pairs, replace_with_fused_ops, rms_norm, rotary
from executor.redistribute import Redistributor
from executor.torch_internals.dtensor import make_dtensor
from planner import PlanningSession
from planner.errors import PlanLayoutError
from planner.model_rewrites.fused_kernels import ACTIVATIONS
from planner.plan.sharding_plan import ShardingPlan

R, P, S0, S1, S2, S3 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2), Shard(3)
EPS = 1e-6
TOLERANCE = 1e-5
BATCH = 8
Fused = Callable[..., torch.Tensor]
Case = tuple[str, Fused, Fused, Inputs]
"""(name, fused op, chain of torch's ops, inputs with their layouts)."""


def norms() -> Iterator[Case]:
    x, weight = torch.randn(8, 4, 16), torch.randn(16)
    for x_layout, weight_layout in layouts((R, R), (S0, R), (S1, R)):
        yield (
            "rms_norm",
            lambda redistributor, x, w: rms_norm(redistributor, x, w, EPS),
            lambda x, w: F.rms_norm(x, (16,), w, EPS),
            ((x, x_layout), (weight, weight_layout)),
        )


def activations() -> Iterator[Case]:
    gate, up = torch.randn(8, 4, 16), torch.randn(8, 4, 16)
    for name, function in ACTIVATIONS.items():
        for gate_layout, up_layout in layouts((R, R), (S0, S0), (S1, S1), (S2, S2)):
            yield (
                name,
                lambda redistributor, gate, up, name=name: gated(redistributor, gate, up, name),
                lambda gate, up, function=function: function(gate) * up,
                ((gate, gate_layout), (up, up_layout)),
            )


def pairs() -> Iterator[Case]:
    both = torch.randn(8, 4, 16)
    for name, function in ACTIVATIONS.items():
        for (layout,) in layouts((R,), (S0,), (S1,), (S2,)):
            yield (
                f"pairs {name}",
                lambda redistributor, x, name=name: gated_pairs(redistributor, x, name),
                lambda x, function=function: function(x[..., ::2]) * x[..., 1::2],
                ((both, layout),),
            )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, None] + swapped * sin[:, None]


def rotations() -> Iterator[Case]:
    x = torch.randn(4, 8, 8, 6).transpose(1, 2)  # strides of a projection's heads
    for samples in (1, 4):
        cos, sin = torch.randn(samples, 8, 6), torch.randn(samples, 8, 6)
        for (layout,) in layouts((R,), (S0,), (S1,), (S2,)):
            yield (
                f"rotary {samples}",
                lambda redistributor, x, cos=cos, sin=sin: rotary(redistributor, x, cos, sin),
                lambda x, cos=cos, sin=sin: rotate(x, cos, sin),
                ((x, layout),),
            )


def losses() -> Iterator[Case]:
    logits, labels = 4 * torch.randn(16, 8), torch.randint(0, 8, (16,))
    labels[:7] = -100
    for logits_layout, labels_layout in layouts((R, R), (S0, S0), (S0, R), (S1, R)):
        for mean in (True, False):
            yield (
                "cross_entropy",
                lambda redistributor, x, y, mean=mean: fused_cross_entropy(redistributor, x, y, -100, mean),
                lambda x, y, mean=mean: F.cross_entropy(x, y, reduction="mean" if mean else "sum"),
                ((logits, logits_layout), (labels, labels_layout)),
            )


def check_all(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
    redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=MESH))
    torch.manual_seed(0)
    wrong = []
    for name, op, chain, inputs in itertools.chain(norms(), activations(), pairs(), rotations(), losses()):
        text = f"{name} {[format_layout(layout) for _, layout in inputs]}"
        plain = [leaf(tensor) for tensor, _ in inputs]
        expected = chain(*plain)
        gradient = torch.randn_like(expected)
        expected.backward(gradient)
        for spread in (False, True):
            sharded = [leaf(distribute_tensor(tensor.detach(), mesh, layout)) for tensor, layout in inputs]
            actual = op(redistributor, *sharded)
            if not isinstance(actual, DTensor) or not close(actual, expected):
                wrong.append(f"{text}: {actual} for {expected}")
                continue
            actual.backward(output_gradient(gradient, actual, mesh, spread))
            wrong += [
                f"{text}, gradient spread {spread}: {tensor.grad.placements}"
                for tensor, reference in zip(sharded, plain, strict=True)
                if reference.grad is not None and not close(tensor.grad, reference.grad)
            ]
    return wrong + check_errors(redistributor, mesh) + check_plain(redistributor)


def output_gradient(gradient: torch.Tensor, result: DTensor, mesh: DeviceMesh, spread: bool) -> DTensor:
    """Return a result's gradient in its layout; ``spread``: where that is replicated each rank has an addend of it."""
    back = tuple(R if isinstance(place, Partial) else place for place in result.placements)
    whole = distribute_tensor(gradient, mesh, back)
    if not spread:
        return whole
    shares = 1
    for place, size in zip(back, mesh.shape, strict=True):
        shares *= size if place == R else 1
    parts = tuple(P if place == R else place for place in back)
    return make_dtensor(whole.to_local() / shares, mesh, parts, gradient.shape, gradient.stride())


def check_errors(redistributor: Redistributor, mesh: DeviceMesh) -> list[str]:
    def tensor_in(shape: tuple[int, ...], *layout: object) -> DTensor:
        return distribute_tensor(torch.randn(shape), mesh, layout)

    x, weight, angles = tensor_in((8, 4, 16), R, R), tensor_in((16,), R, R), torch.randn(1, 4, 4)
    faulty: dict[str, Callable[[], object]] = {
        "a norm over a sharded dim": lambda: rms_norm(redistributor, tensor_in((8, 4, 16), R, S2), weight, EPS),
        "a norm with a sharded weight": lambda: rms_norm(redistributor, x, tensor_in((16,), R, S0), EPS),
        "gate and up in two layouts": lambda: gated(redistributor, x, tensor_in((8, 4, 16), S0, R), "silu"),
        "a gate and its up on two ranks": lambda: gated_pairs(redistributor, tensor_in((8, 4, 6), R, S2), "silu"),
        "a sharded width": lambda: rotary(redistributor, tensor_in((4, 4, 4, 4), R, S3), angles, angles),
    }
    wrong = []
    for name, call in faulty.items():
        try:
            call()
        except PlanLayoutError as error:
            if "layout" not in str(error):
                wrong.append(f"{name}: {error}")
        else:
            wrong.append(f"{name} raised no error")
    return wrong


def check_plain(redistributor: Redistributor) -> list[str]:
    module = LlamaMLP(transformers.LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2))
    x = torch.randn(4, 8)
    expected = module(x)
    replace_with_fused_ops(module, redistributor)
    actual = module(x)
    is_equal = type(actual) is torch.Tensor and torch.equal(actual, expected)
    return [] if is_equal else [f"a plain tensor gave {actual}"]


def test_fused_ops_equal_the_chains_that_they_replace() -> None:
    assert run_on_gloo(check_all, 4) == [[]] * 4


def plans_of(family: str, planners: list[str], ac: str) -> dict[str, dict]:
    module, inputs = make(family, BATCH)
    job = {"dtype": "fp32", "optimizer": "sgd", "micro_batches": 1, "ac": ac, "fused_ops": True}
    session = PlanningSession(module, cluster="1x4xtoy", example_inputs=inputs, **job)
    plans = {planner: session.plan(planner=planner, mesh="dp=2,tp=2") for planner in planners}
    assert all("run as fused ops" in plan.notes[-1] for plan in plans.values())
    return {planner: plan.to_dict() for planner, plan in plans.items()}


PLANNERS = ["ilp", "fully-sharded", "tensor-parallel", "random:0", "random:1"]


@pytest.mark.parametrize(
    ("family", "ac", "planners"),
    [
        pytest.param("llama", "none", PLANNERS, marks=pytest.mark.slow),
        ("llama", "selective", ["ilp", "random:1"]),
        pytest.param("mixtral", "full", PLANNERS, marks=pytest.mark.slow),
        pytest.param("deepseek", "none", PLANNERS, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_equal_the_unsharded_models(family: str, ac: str, planners: list[str]) -> None:
    plans = plans_of(family, planners, ac)
    for errors in run_on_gloo(train_all, 4, family, plans, "sgd"):
        for planner, error in errors.items():
            assert error.loss <= TOLERANCE, (planner, error)
            assert error.gradient <= TOLERANCE, (planner, error)
