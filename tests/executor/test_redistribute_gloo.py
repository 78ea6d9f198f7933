"""Every redistribution preserves the values of a tensor and of its gradient, on real processes."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.gloo import run_on_gloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cost_model.layouts.layout import Layout, format_layout, local_shape, parse_layout
from executor.redistribute import Redistributor, conjugate
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

SHAPE = (8, 12)
MESHES = {"2x2": (2, 2), "4x1": (4, 1)}
PLACEMENTS = (Replicate(), Shard(0), Shard(1), Partial())
PAIRS = [
    (source, target)
    for source in itertools.product(PLACEMENTS, repeat=2)
    for target in itertools.product(PLACEMENTS[:3], repeat=2)
]


def values(layout: Layout, mesh, shape: tuple[int, ...]) -> tuple[DTensor, torch.Tensor]:
    """Return a tensor in ``layout``, with different addends on ranks where it is partial, and its global values."""
    global_values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    local = global_values
    factor = 1.0
    for axis, placement in enumerate(layout):
        size, index = mesh.size(axis), mesh.get_coordinate()[axis]
        if isinstance(placement, Shard):
            local = local.chunk(size, placement.dim)[index]
        elif isinstance(placement, Partial):
            factor *= (index + 1) / (size * (size + 1) / 2)
    return DTensor.from_local(local.contiguous() * factor, mesh, layout, run_check=False), global_values


def check(rank: int) -> list[str]:
    wrong = []
    for name, shape in MESHES.items():
        axes = (("a", shape[0]), ("b", shape[1]))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
        redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=PlanMesh(axes=axes, device="cpu")))
        for source, target in PAIRS:
            text = f"{name} {format_layout(source)} -> {format_layout(target)}"
            start, global_values = values(source, mesh, SHAPE)
            start.requires_grad_()
            result = redistributor.redistribute(start, target)
            if result.placements != target or tuple(result.to_local().shape) != local_shape(SHAPE, target, shape):
                wrong.append(f"{text}: layout")
            if not torch.allclose(result.full_tensor(), global_values):
                wrong.append(f"{text}: values")
            gradient, expected = values(conjugate(target), mesh, SHAPE)
            (actual,) = torch.autograd.grad(result, start, gradient)
            if actual.placements != conjugate(source):
                wrong.append(f"{text}: layout of the gradient")
            if not torch.allclose(actual.full_tensor(), expected):
                wrong.append(f"{text}: gradient")
        wrong += check_partial_gradients(redistributor, mesh, name)
    return wrong


def check_partial_gradients(redistributor: Redistributor, mesh, name: str) -> list[str]:
    """Check the gradient of a replicated tensor, from and to partial layouts."""
    wrong = []
    partial, replicated = (Partial(), Replicate()), (Replicate(), Replicate())
    for grad_layout, source_grad in (
        (partial, replicated),
        (partial, partial),
        (replicated, partial),
        ((Shard(0), Shard(1)), partial),
    ):
        start, _ = values(replicated, mesh, SHAPE)
        start.requires_grad_()
        result = redistributor.redistribute(start, replicated, source_grad)
        gradient, expected = values(grad_layout, mesh, SHAPE)
        (actual,) = torch.autograd.grad(result, start, gradient)
        if actual.placements != source_grad or not torch.allclose(actual.full_tensor(), expected):
            wrong.append(f"{name} gradient {format_layout(grad_layout)} -> {format_layout(source_grad)}")
    return wrong


def test_redistributions_preserve_values_and_gradients() -> None:
    assert run_on_gloo(check, 4) == [[]] * 4


@pytest.mark.parametrize(("layout", "expected"), [(["S(0)", "R"], ["S(0)", "R"]), (["P(sum)", "S(1)"], ["R", "S(1)"])])
def test_conjugate_makes_partial_replicated(layout: list[str], expected: list[str]) -> None:
    assert conjugate(parse_layout(layout)) == parse_layout(expected)
