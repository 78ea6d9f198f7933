"""Linear layers that read the same tensor: their gradients are torch's, and that of the tensor needs no sum."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.executor_cases import MESH
from support.gloo import run_on_gloo
from support.split_inputs import close, layouts, leaf
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cost_model.layouts.layout import Layout, format_layout
from executor.ops.shared_input_linears import SharedInputLinears
from executor.redistribute import Redistributor
from executor.torch_internals import fake_process_group
from planner.plan.sharding_plan import ShardingPlan

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
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
    redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=MESH))
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
    joined = SharedInputLinears()

    def linear(*args: Any) -> torch.Tensor:
        found = joined(redistributor, *args)
        assert found is not NotImplemented
        return found  # type: ignore[no-any-return]

    biases = [tuple(S0 if place == S0 else R for place in layout) for layout in at]
    split = [*at, *biases][: len(weights)]
    placed = (x, *zip(weights, split, strict=True))
    given = [leaf(distribute_tensor(tensor, mesh, layout)) for tensor, layout in placed]
    replicated = [distribute_tensor(factor, mesh, (R, R)) for factor in factors]
    loss = loss_of(linear, given[0] * 1.0, given[1:], replicated)
    loss.backward(torch.ones_like(loss))
    if not close(loss, expected):
        return f"loss {loss} for {expected}"
    names = ("x", *(f"weight {i}" for i in range(len(weights))))
    off = [name for name, mine, own in zip(names, given, whole, strict=True) if not close(mine.grad, own.grad)]
    return f"gradients of {off}" if off else ""


def test_gradients_are_those_of_the_layers_one_by_one() -> None:
    assert run_on_gloo(check_layouts, 4) == [[]] * 4


class Given(NamedTuple):
    """Layers on a fake mesh, joined and one by one."""

    redistributor: Redistributor
    linears: SharedInputLinears
    x: DTensor
    weights: list[DTensor]

    def joined(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        found = self.linears(self.redistributor, *args, **kwargs)
        assert found is not NotImplemented
        return found  # type: ignore[no-any-return]

    def joined_if_so(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return what is joined, where that is, as `OwnOps` does."""
        found = self.linears(self.redistributor, x, weight)
        return F.linear(x, weight) if found is NotImplemented else found

    def fresh(self) -> list[DTensor]:
        """Return the input and the weights as leaves of their own."""
        return [tensor.detach().requires_grad_() for tensor in (self.x, *self.weights)]  # type: ignore[misc]


@pytest.fixture
def given() -> Iterator[Given]:
    torch.manual_seed(0)
    with fake_process_group(MESH.size):
        mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
        redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=MESH))
        x = distribute_tensor(torch.randn(8, 4, 16), mesh, (S0, R), src_data_rank=None).requires_grad_()
        weights = [distribute_tensor(w, mesh, (R, S0), src_data_rank=None).requires_grad_() for w in weights_of(False)]
        yield Given(redistributor, SharedInputLinears(), x, weights)


def loss_by(linear: Linear, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = sum(linear(x, weight).exp().sum() for weight in weights)  # type: ignore[assignment]
    return loss


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's piece, of a sum its addend: no other rank answers."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def test_products_add_to_what_is_there(given: Given) -> None:
    read = given.x * 1.0
    loss = loss_by(given.joined, read, given.weights)
    with Ops() as ops:
        loss.backward(torch.ones_like(loss))
    assert ops.counts["addmm_"] == 2
    assert ops.counts["mm"] == 4  # the first layer's two, and the gradients of the others' weights
    assert ops.counts["add"] + ops.counts["add_"] == 0


def test_layers_whose_results_nobody_uses_are_not_waited_for(given: Given) -> None:
    plain = given.x.detach().requires_grad_()
    read = given.x * 1.0
    results = [given.joined(read, weight) for weight in given.weights]
    results[1].sum().backward()
    F.linear(plain, given.weights[1]).sum().backward()
    assert torch.equal(whole(given.x.grad), whole(plain.grad))


def test_passes_over_the_same_layers_leave_nothing_to_each_other(given: Given) -> None:
    """Two in a row, one that asked for the weights' gradients alone, and one that broke off."""
    x, *weights = given.fresh()
    loss_by(F.linear, x, weights).backward()
    read = given.x * 1.0
    broken = [False]

    def breaking(gradient: torch.Tensor) -> None:
        if broken[0]:
            raise RuntimeError("broken")

    results = [given.joined(read, weight) for weight in given.weights]
    results[0].register_hook(breaking)  # the last that runs
    loss = sum(result.exp().sum() for result in results)
    torch.autograd.grad([loss], given.weights, retain_graph=True)
    broken[0] = True
    with pytest.raises(RuntimeError, match="broken"):
        loss.backward(retain_graph=True)
    broken[0] = False
    for _ in range(2):
        given.x.grad = None
        loss.backward(retain_graph=True)
        torch.testing.assert_close(whole(given.x.grad), whole(x.grad))


def test_a_gradient_of_a_gradient_is_refused(given: Given) -> None:
    loss = loss_by(given.joined, given.x * 1.0, given.weights)
    with pytest.raises(RuntimeError, match="plan without --fused-ops"):
        torch.autograd.grad([loss], [given.x], create_graph=True)


def test_a_tensor_that_is_changed_is_another_tensor(given: Given) -> None:
    added = torch.ones_like(given.x).requires_grad_()
    read = given.x * 1.0
    first = given.joined(read, given.weights[0])
    read.add_(added)
    second = given.joined(read, given.weights[1])
    x, plain_added = given.x.detach().requires_grad_(), added.detach().requires_grad_()
    (F.linear(x + plain_added, given.weights[1]).sum()).backward()
    second.sum().backward()
    torch.testing.assert_close(whole(added.grad), whole(plain_added.grad))
    torch.testing.assert_close(whole(given.x.grad), whole(x.grad))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_joins_what_it_runs_again(given: Given, reentrant: bool) -> None:
    """The block's own input, which is a leaf while a reentrant one runs again, and a tensor made inside."""
    x, *weights = given.fresh()
    loss_by(F.linear, x, weights).backward()
    loss_by(F.linear, x.sin(), weights).backward()

    def block(read: torch.Tensor) -> torch.Tensor:
        once = loss_by(given.joined_if_so, read, given.weights)
        return once + loss_by(given.joined_if_so, read.sin(), given.weights)

    checkpoint(block, given.x * 1.0, use_reentrant=reentrant).backward()
    torch.testing.assert_close(whole(given.x.grad), whole(x.grad))
    for mine, own in zip(given.weights, weights, strict=True):
        torch.testing.assert_close(whole(mine.grad), whole(own.grad))
    gc.collect()
    assert len(given.linears._inputs) == 0


def test_a_tensor_is_forgotten_when_it_is_gone(given: Given) -> None:
    read = given.x * 1.0
    loss = given.joined(read, given.weights[0]).sum()
    assert len(given.linears._inputs) == 1
    del read
    loss.backward()
    del loss
    gc.collect()
    assert len(given.linears._inputs) == 0


def test_of_a_frozen_weight_the_input_is_not_kept(given: Given) -> None:
    kept: list[tuple[int, ...]] = []
    read, frozen = given.x * 1.0, given.weights[0].detach()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = given.joined(read, frozen)
    assert kept == [tuple(frozen.shape)]
    result.sum().backward()
    assert given.x.grad is not None


def test_a_plain_gradient_and_names_of_arguments_are_taken(given: Given) -> None:
    result = given.joined(input=given.x * 1.0, weight=given.weights[0], bias=None)
    result.backward(torch.ones(result.shape))
    assert given.x.grad is not None


def test_elsewhere_dtensor_runs_the_layer(given: Given) -> None:
    def is_left(x: torch.Tensor) -> bool:
        return given.linears(given.redistributor, x, given.weights[0]) is NotImplemented

    assert is_left(given.x)  # a leaf
    assert is_left(given.x.detach())
    read = given.x * 1.0
    assert is_left(read.to_local())
    with torch.no_grad():
        assert is_left(read)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_left(read)
    assert not is_left(read)
