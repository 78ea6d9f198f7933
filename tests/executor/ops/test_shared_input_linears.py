"""Linear layers that read one tensor: gradients equal torch's, and the tensor's needs no additions."""

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
from executor.torch_internals.dtensor import fake_process_group
from planner.plan.sharding_plan import ShardingPlan

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
Shape = tuple[int, ...]
Linear = Callable[..., torch.Tensor]

WIDTHS = (24, 8, 8)
"""Widths of the results of q, k and v projections."""


class Ops(TorchDispatchMode):
    """Counts the ops that are dispatched on DTensors and on local tensors."""

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
    """Return a scalar that depends on the results of all layers and on ``x`` itself."""
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
    # Batch, sequence, outputs or the reduced width are sharded; the last layer may have another layout.
    cases = itertools.product(layouts((R, R), (S0, R), (S1, R), (R, S0), (S2, S1)), (False, True), (False, True))
    for (x_layout, layout), bias, odd in cases:
        if x_layout == (S1, S1):  # DTensor cannot shard the rows of its product again
            continue
        weights = weights_of(bias)
        at = [layout] * len(WIDTHS)
        if odd:
            at[-1] = tuple(R if place == S0 else place for place in layout)
        fault = check_one(mesh, redistributor, (x, x_layout), weights, at, factors)
        if fault:
            wrong.append(f"{format_layout(x_layout)}, {[format_layout(a) for a in at]}, bias {bias}: {fault}")
    return wrong


def check_one(
    mesh: DeviceMesh,
    redistributor: Redistributor,
    x: tuple[torch.Tensor, Layout],
    weights: Sequence[torch.Tensor],
    at: Sequence[Layout],
    factors: Sequence[torch.Tensor],
) -> str:
    plain = [leaf(tensor) for tensor in (x[0], *weights)]
    expected = loss_of(F.linear, plain[0], plain[1:], factors)
    expected.backward()
    linears = SharedInputLinears()

    def linear(*args: Any) -> torch.Tensor:
        result = linears(redistributor, *args)
        assert result is not NotImplemented
        return result  # type: ignore[no-any-return]

    biases = [tuple(S0 if place == S0 else R for place in layout) for layout in at]
    split = [*at, *biases][: len(weights)]
    placed = (x, *zip(weights, split, strict=True))
    sharded = [leaf(distribute_tensor(tensor, mesh, layout)) for tensor, layout in placed]
    replicated = [distribute_tensor(factor, mesh, (R, R)) for factor in factors]
    loss = loss_of(linear, sharded[0] * 1.0, sharded[1:], replicated)
    loss.backward(torch.ones_like(loss))
    if not close(loss, expected):
        return f"loss {loss} for {expected}"
    names = ("x", *(f"weight {i}" for i in range(len(weights))))
    wrong = [name for name, a, b in zip(names, sharded, plain, strict=True) if not close(a.grad, b.grad)]
    return f"gradients of {wrong}" if wrong else ""


def test_gradients_equal_those_of_separate_layers() -> None:
    assert run_on_gloo(check_layouts, 4) == [[]] * 4


class Layers(NamedTuple):
    """Shared-input linears on a fake mesh, with an input and weights."""

    redistributor: Redistributor
    linears: SharedInputLinears
    x: DTensor
    weights: list[DTensor]

    def shared(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        result = self.linears(self.redistributor, *args, **kwargs)
        assert result is not NotImplemented
        return result  # type: ignore[no-any-return]

    def dispatched(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the layer's result, of DTensor where the op does not cover the call, as ``OwnOps`` does."""
        result = self.linears(self.redistributor, x, weight)
        return F.linear(x, weight) if result is NotImplemented else result

    def fresh(self) -> list[DTensor]:
        """Return copies of the input and the weights as leaves."""
        return [tensor.detach().requires_grad_() for tensor in (self.x, *self.weights)]  # type: ignore[misc]


@pytest.fixture
def layers() -> Iterator[Layers]:
    torch.manual_seed(0)
    with fake_process_group(MESH.size):
        mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
        redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=MESH))
        x = distribute_tensor(torch.randn(8, 4, 16), mesh, (S0, R), src_data_rank=None).requires_grad_()
        weights = [distribute_tensor(w, mesh, (R, S0), src_data_rank=None).requires_grad_() for w in weights_of(False)]
        yield Layers(redistributor, SharedInputLinears(), x, weights)


def loss_by(linear: Linear, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = sum(linear(x, weight).exp().sum() for weight in weights)  # type: ignore[assignment]
    return loss


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the local tensor: fake processes cannot gather."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def test_gemms_accumulate_the_inputs_gradient(layers: Layers) -> None:
    read = layers.x * 1.0
    loss = loss_by(layers.shared, read, layers.weights)
    with Ops() as ops:
        loss.backward(torch.ones_like(loss))
    assert ops.counts["addmm_"] == 2
    assert ops.counts["mm"] == 4  # the first layer's two, and the gradients of the others' weights
    assert ops.counts["add"] + ops.counts["add_"] == 0


def test_layers_with_unused_results_are_skipped(layers: Layers) -> None:
    plain = layers.x.detach().requires_grad_()
    read = layers.x * 1.0
    results = [layers.shared(read, weight) for weight in layers.weights]
    results[1].sum().backward()
    F.linear(plain, layers.weights[1]).sum().backward()
    assert torch.equal(local(layers.x.grad), local(plain.grad))


def test_backward_passes_do_not_affect_each_other(layers: Layers) -> None:
    """Two in sequence, one for the gradients of weights alone, and an interrupted one."""
    x, *weights = layers.fresh()
    loss_by(F.linear, x, weights).backward()
    read = layers.x * 1.0
    fails = [False]

    def fail(gradient: torch.Tensor) -> None:
        if fails[0]:
            raise RuntimeError("on purpose")

    results = [layers.shared(read, weight) for weight in layers.weights]
    results[0].register_hook(fail)  # the last layer that runs
    loss = sum(result.exp().sum() for result in results)
    torch.autograd.grad([loss], layers.weights, retain_graph=True)
    fails[0] = True
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward(retain_graph=True)
    fails[0] = False
    for _ in range(2):
        layers.x.grad = None
        loss.backward(retain_graph=True)
        torch.testing.assert_close(local(layers.x.grad), local(x.grad))


def test_a_second_derivative_is_an_error(layers: Layers) -> None:
    loss = loss_by(layers.shared, layers.x * 1.0, layers.weights)
    with pytest.raises(RuntimeError, match="plan without the technique fused-ops"):
        torch.autograd.grad([loss], [layers.x], create_graph=True)


def test_a_tensor_that_is_changed_in_place_is_a_new_input(layers: Layers) -> None:
    added = torch.ones_like(layers.x).requires_grad_()
    read = layers.x * 1.0
    first = layers.shared(read, layers.weights[0])
    read.add_(added)
    second = layers.shared(read, layers.weights[1])
    x, plain_added = layers.x.detach().requires_grad_(), added.detach().requires_grad_()
    (F.linear(x + plain_added, layers.weights[1]).sum()).backward()
    second.sum().backward()
    torch.testing.assert_close(local(added.grad), local(plain_added.grad))
    torch.testing.assert_close(local(layers.x.grad), local(x.grad))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_share_their_input(layers: Layers, reentrant: bool) -> None:
    """Both the block's own input, a leaf in a reentrant recomputation, and a tensor of the block."""
    x, *weights = layers.fresh()
    loss_by(F.linear, x, weights).backward()
    loss_by(F.linear, x.sin(), weights).backward()

    def block(read: torch.Tensor) -> torch.Tensor:
        once = loss_by(layers.dispatched, read, layers.weights)
        return once + loss_by(layers.dispatched, read.sin(), layers.weights)

    checkpoint(block, layers.x * 1.0, use_reentrant=reentrant).backward()
    torch.testing.assert_close(local(layers.x.grad), local(x.grad))
    for weight, reference in zip(layers.weights, weights, strict=True):
        torch.testing.assert_close(local(weight.grad), local(reference.grad))
    gc.collect()
    assert len(layers.linears._inputs) == 0


def test_an_input_is_forgotten_when_it_is_freed(layers: Layers) -> None:
    read = layers.x * 1.0
    loss = layers.shared(read, layers.weights[0]).sum()
    assert len(layers.linears._inputs) == 1
    del read
    loss.backward()
    del loss
    gc.collect()
    assert len(layers.linears._inputs) == 0


def test_a_layer_with_a_frozen_weight_does_not_save_its_input(layers: Layers) -> None:
    saved: list[tuple[int, ...]] = []
    read, frozen = layers.x * 1.0, layers.weights[0].detach()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = layers.shared(read, frozen)
    assert saved == [tuple(frozen.shape)]
    result.sum().backward()
    assert layers.x.grad is not None


def test_plain_gradients_and_keyword_arguments_are_accepted(layers: Layers) -> None:
    result = layers.shared(input=layers.x * 1.0, weight=layers.weights[0], bias=None)
    result.backward(torch.ones(result.shape))
    assert layers.x.grad is not None


def test_gradients_accumulate_only_where_they_can(layers: Layers) -> None:
    def accumulates(x: torch.Tensor) -> bool:
        layers.linears(layers.redistributor, x, layers.weights[0])
        return x in layers.linears._inputs

    assert not accumulates(layers.x)  # a leaf
    assert not accumulates(layers.x.detach())
    read = layers.x * 1.0
    with torch.no_grad():
        assert not accumulates(read)
    plain = layers.linears(layers.redistributor, read.to_local(), layers.weights[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = layers.linears(layers.redistributor, read, layers.weights[0])
    assert plain is NotImplemented
    assert cast is NotImplemented
    assert accumulates(read)
