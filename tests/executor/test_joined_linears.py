"""Linear layers that read the same tensor: their gradients are torch's, and that of the tensor needs no sum."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executor_cases import MESH
from gloo import run_on_gloo
from split_inputs import close, layouts, leaf
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cost_model.layout import Layout, format_layout
from executor.op_linear import JoinedLinears
from executor.redistribute import Redistributor
from executor.torch_internals import fake_process_group
from planner.plan import ShardingPlan

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
Shape = tuple[int, ...]
Linear = Callable[..., torch.Tensor]

WIDTHS = (24, 8, 8)
"""Of the results of query, key and value projections, say."""


class Ops(TorchDispatchMode):
    """Counts what is dispatched, of DTensors and of local pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.counts[str(func.overloadpacket).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def weights_of(bias: bool) -> list[torch.Tensor]:
    weights = [torch.randn(width, 16) for width in WIDTHS]
    return weights + ([torch.randn(width) for width in WIDTHS] if bias else [])


def loss_of(linear: Linear, x: torch.Tensor, weights: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]) -> Any:
    """Return a scalar that every layer's result and ``x`` itself have a part in."""
    count = len(WIDTHS)
    biases = weights[count:] or (None,) * count
    results = [linear(x, weight, bias) for weight, bias in zip(weights[:count], biases, strict=True)]
    return sum((result * factor).sum() for result, factor in zip(results, factors, strict=True)) + (x * x).sum()


def check_layouts(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
    redistributor = Redistributor.of_plan(mesh, ShardingPlan(mesh=MESH))
    torch.manual_seed(0)
    x, wrong = torch.randn(8, 4, 16), []
    factors = [torch.randn(8, 4, width) for width in WIDTHS]
    # Batch, sequence, outputs or the width that is summed over are split; the last layer may be split otherwise.
    cases = itertools.product(layouts((R, R), (S0, R), (S1, R), (R, S0), (S2, S1)), (False, True), (False, True))
    for (x_layout, layout), bias, odd in cases:
        if x_layout == (S1, S1):  # torch's DTensor cannot split the rows of its product again
            continue
        weights = weights_of(bias)
        at = [layout] * len(WIDTHS)
        if odd:
            at[-1] = tuple(R if place == S0 else place for place in layout)
        found = check_one(mesh, redistributor, (x, x_layout), weights, at, factors)
        if found:
            wrong.append(f"{format_layout(x_layout)}, {[format_layout(a) for a in at]}, bias {bias}: {found}")
    return wrong


def check_one(
    mesh: DeviceMesh,
    redistributor: Redistributor,
    x: tuple[torch.Tensor, Layout],
    weights: Sequence[torch.Tensor],
    at: Sequence[Layout],
    factors: Sequence[torch.Tensor],
) -> str:
    whole = [leaf(tensor) for tensor in (x[0], *weights)]
    expected = loss_of(F.linear, whole[0], whole[1:], factors)
    expected.backward()
    joined = JoinedLinears()

    def linear(*args: Any) -> torch.Tensor:
        found = joined(redistributor, *args)
        assert found is not NotImplemented
        return found  # type: ignore[no-any-return]

    biases = [tuple(S0 if place == S0 else R for place in layout) for layout in at]
    split = [*at, *biases][: len(weights)]
    placed = (x, *zip(weights, split, strict=True))
    given = [leaf(distribute_tensor(tensor, mesh, layout)) for tensor, layout in placed]
    replicated = [distribute_tensor(factor, mesh, (R, R)) for factor in factors]
    loss = loss_of(linear, given[0], given[1:], replicated)
    loss.backward(torch.ones_like(loss))
    if not close(loss, expected):
        return f"loss {loss} for {expected}"
    names = ("x", *(f"weight {i}" for i in range(len(weights))))
    off = [name for name, mine, own in zip(names, given, whole, strict=True) if not close(mine.grad, own.grad)]
    return f"gradients of {off}" if off else ""


def test_gradients_are_those_of_the_layers_one_by_one() -> None:
    assert run_on_gloo(check_layouts, 4) == [[]] * 4


@pytest.fixture
def given() -> Any:
    torch.manual_seed(0)
    with fake_process_group(MESH.size):
        mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
        redistributor = Redistributor.of_plan(mesh, ShardingPlan(mesh=MESH))
        x = distribute_tensor(torch.randn(8, 4, 16), mesh, (S0, R), src_data_rank=None).requires_grad_()
        weights = [distribute_tensor(w, mesh, (R, S0), src_data_rank=None).requires_grad_() for w in weights_of(False)]
        yield redistributor, x, weights


def test_products_add_to_what_is_there(given: Any) -> None:
    redistributor, x, weights = given
    joined, read = JoinedLinears(), x * 1.0
    results = [joined(redistributor, read, weight) for weight in weights]
    loss = sum(result.exp().sum() for result in results)
    with Ops() as ops:
        loss.backward(torch.ones_like(loss))
    assert ops.counts["addmm_"] == 2
    assert ops.counts["mm"] == 4  # the first layer's two, and the gradients of the others' weights
    assert ops.counts["add"] + ops.counts["add_"] == 0


def test_layers_whose_results_nobody_uses_are_not_waited_for(given: Any) -> None:
    redistributor, x, weights = given
    joined, plain = JoinedLinears(), x.detach().requires_grad_()
    results = [joined(redistributor, x, weight) for weight in weights]
    results[1].sum().backward()
    F.linear(plain, weights[1]).sum().backward()
    assert torch.equal(x.grad.to_local(), plain.grad.to_local())
    # Of another backward through the same layers nothing of the first is left.
    kept = [joined(redistributor, x, weight).sum() for weight in weights[:2]]
    x.grad = plain.grad = None
    for _ in range(2):
        (kept[0] + kept[1]).backward(retain_graph=True)
    (F.linear(plain, weights[0]).sum() + F.linear(plain, weights[1]).sum()).backward()
    torch.testing.assert_close(x.grad.to_local(), 2 * plain.grad.to_local())


def test_a_tensor_is_forgotten_when_it_is_gone(given: Any) -> None:
    redistributor, x, weights = given
    joined = JoinedLinears()
    read = x * 1.0
    loss = joined(redistributor, read, weights[0]).sum()
    assert len(joined._reads) == 1
    del read
    loss.backward()
    del loss
    gc.collect()
    assert len(joined._reads) == 0


def test_without_a_gradient_dtensor_runs_the_layer(given: Any) -> None:
    redistributor, x, weights = given
    joined = JoinedLinears()
    assert joined(redistributor, x.detach(), weights[0]) is NotImplemented
    assert joined(redistributor, x.to_local(), weights[0]) is NotImplemented
    with torch.no_grad():
        assert joined(redistributor, x, weights[0]) is NotImplemented
