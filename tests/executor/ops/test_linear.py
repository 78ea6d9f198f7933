"""Linear layers on local tensors: results and gradients equal torch's in every covered layout, also of one sample."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.executor_cases import MESH
from support.gloo import run_on_gloo
from support.split_inputs import close, layouts, leaf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cost_model.layouts.layout import format_layout
from cost_model.layouts.linear import linear_gradients, linear_layout
from executor.ops.linear import linear
from executor.ops.shared_input_linears import SharedInputLinears
from executor.redistribute import Redistributor
from planner.plan.sharding_plan import ShardingPlan

R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()


def check_layouts(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
    redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=MESH))
    torch.manual_seed(0)
    wrong, cases = [], 0
    # Batch, sequence, outputs or the reduced width are sharded; a rank has one sample of the smaller batch.
    pairs = layouts((R, R), (S0, R), (S1, R), (R, S0), (S2, S1))
    for (x_layout, weight_layout), bias, batch in itertools.product(pairs, (False, True), (2, 4)):
        if sum(place == S0 for place in x_layout) == 2 and batch == 2:
            continue
        cases += 1
        tensors = [torch.randn(batch, 4, 8), torch.randn(12, 8), *([torch.randn(12)] if bias else [])]
        placed = [x_layout, weight_layout, tuple(S0 if place == S0 else R for place in weight_layout)]
        plain = [leaf(tensor) for tensor in tensors]
        sharded = [leaf(distribute_tensor(t, mesh, layout)) for t, layout in zip(tensors, placed, strict=False)]
        factor = torch.randn(batch, 4, 12)
        (F.linear(*plain) * factor).sum().backward()
        result = linear(redistributor, *sharded)
        assert isinstance(result, DTensor), "the layouts are covered"
        expected = linear_layout(*placed[: len(sharded)], last_dim=2)
        gradient = distribute_tensor(factor, mesh, [R if p.is_partial() else p for p in result.placements])
        with mock.patch.object(DTensor, "reshape", side_effect=AssertionError("DTensor runs the backward")):
            result.backward(gradient)
        same = [close(a.grad, b.grad) for a, b in zip(sharded, plain, strict=True)]
        if tuple(result.placements) != expected or not close(result, F.linear(*plain)) or not all(same):
            wrong.append(f"{format_layout(x_layout)}, {format_layout(weight_layout)}, bias {bias}, {batch}: {same}")
    return wrong if cases > 40 else ["too few cases"]


def test_results_and_gradients_equal_torchs() -> None:
    assert run_on_gloo(check_layouts, 4) == [[]] * 4


def check_other_gradient(rank: int) -> bool:
    """The gradient arrives in a layout that is not covered, and create_graph asks for a second derivative."""
    mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
    redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=MESH))
    torch.manual_seed(0)
    x, weight, factor = torch.randn(4, 4, 8), torch.randn(12, 8), torch.randn(4, 4, 12)
    plain = [leaf(x), leaf(weight)]
    sharded = [leaf(distribute_tensor(x, mesh, (S0, R))), leaf(distribute_tensor(weight, mesh, (R, S0)))]
    (F.linear(*plain) * factor).sum().backward()
    result = linear(redistributor, *sharded)
    result.backward(distribute_tensor(factor, mesh, (S0, R)))
    equal = all(close(a.grad, b.grad) for a, b in zip(sharded, plain, strict=True))

    def second(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad((y**3).sum(), [a], create_graph=True)
        (derivative,) = torch.autograd.grad((first**2).sum(), [b])
        return derivative

    again = linear(redistributor, *sharded)
    return equal and close(second(*sharded, again), second(*plain, F.linear(*plain)))


def test_dtensor_runs_other_backward_passes() -> None:
    assert run_on_gloo(check_other_gradient, 4) == [True] * 4


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [((S2,), (R,), None), ((R,), (S1,), None), ((S0,), (S0,), None), ((P,), (R,), None), ((R,), (R,), (S0,))],
)
def test_other_layouts_are_left_to_dtensor(x: tuple, weight: tuple, bias: tuple | None) -> None:  # type: ignore[type-arg]
    assert linear_layout(x, weight, bias, last_dim=2) is None


def test_a_partial_gradient_stays_partial_where_nothing_is_sharded() -> None:
    assert linear_gradients((P,), (R,), (R,), last_dim=2) == ((P,), (P,), (P,))
    assert linear_gradients((P,), (R,), (S0,), last_dim=2) is None


def check_no_rows(rank: int) -> list[tuple[int, ...]]:
    mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
    redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=MESH))
    x = leaf(distribute_tensor(torch.zeros(0, 8), mesh, (R, R)))
    weight = leaf(distribute_tensor(torch.zeros(12, 8), mesh, (R, S0)))
    for layer in (linear, SharedInputLinears()):
        layer(redistributor, x * 1.0, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [tuple(x.grad.shape), tuple(weight.grad.shape)]


def test_an_expert_without_tokens_has_gradients_of_its_shapes() -> None:
    assert run_on_gloo(check_no_rows, 4) == [[(0, 8), (12, 8)]] * 4
