"""Tensors that are filled in parts with what needs gradients: the module that reads them afterwards is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.any_modules import Filled, Scanned
from torch import Tensor, nn

from planner.errors import ModelError
from planner.graph.capture import to_meta
from planner.graph.example_inputs import meta_inputs
from planner.graph.from_fx import trace
from planner.graph.trace_module import trace_module


class Writes(nn.Module):
    """Applies a function to the result of a layer, and to a copy of the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(16, 16), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), x.clone())


def assigned(y: Tensor, out: Tensor) -> Tensor:
    out[:, 0] = y[:, 1]
    return out * 2


def assigned_to_a_new_tensor(y: Tensor, out: Tensor) -> Tensor:
    new = torch.zeros(out.shape, device=out.device)  # each rank has all of it
    new[:, 0] = y[:, 1]
    return new * 2


def two_slices(y: Tensor, out: Tensor) -> Tensor:
    out[..., 0::2] = y[..., 1::2]
    out[:, -3:] = y[:, :1]
    return out * 2


def returned_as_it_is(y: Tensor, out: Tensor) -> Tensor:
    out[:, 0].copy_(y[:, 1])
    return out


def other_view(y: Tensor, out: Tensor) -> Tensor:
    row = out[:, 0]
    out.add_(y)
    return row * 2


def through_two_views(y: Tensor, out: Tensor) -> Tensor:
    out[:, 2:][:, 1] = y[:, 1]
    return out.sum(1)


def whole(y: Tensor, out: Tensor) -> Tensor:
    out.add_(y)
    return out * 2


def own_view(y: Tensor, out: Tensor) -> Tensor:
    row = y.unflatten(1, (4, 4))
    row.mul_(2)
    return row.flatten(1) + 1


def another_dtype(y: Tensor, out: Tensor) -> Tensor:
    wide = y.double()
    wide.mul_(y.sum())
    return y + wide


def without_gradients(y: Tensor, out: Tensor) -> Tensor:
    out[:, 0] = out[:, 1]
    out[:, 1] = 0.0
    return y + out


def under_no_grad(y: Tensor, out: Tensor) -> Tensor:
    with torch.no_grad():
        out[:, 0] = y[:, 1]
    return y + out


@pytest.mark.parametrize("function", [assigned_to_a_new_tensor, returned_as_it_is, other_view, through_two_views])
def test_what_loses_a_gradient_is_refused(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ModelError, match="the root module assigns") as caught:
        trace(to_meta(Writes(function), None), meta_inputs((torch.zeros(8, 16),)))
    assert caught.value.module == ""
    assert "torch.stack" in caught.value.what_to_do


@pytest.mark.parametrize(
    "function", [assigned, two_slices, whole, own_view, another_dtype, without_gradients, under_no_grad]
)
def test_what_loses_none_is_traced(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    trace(to_meta(Writes(function), None), meta_inputs((torch.zeros(8, 16),)))


@pytest.mark.parametrize(("module", "opaque"), [(Filled(), ""), (nn.Sequential(Scanned(), Scanned()), "0.scan")])
def test_the_module_that_makes_and_fills_the_tensor_becomes_opaque(module: nn.Module, opaque: str) -> None:
    with pytest.raises(ModelError) as caught:
        trace(to_meta(module, None), meta_inputs((torch.zeros(8, 4, 16),)))
    assert caught.value.module == opaque
    graph = trace_module(module, example_inputs=(torch.zeros(8, 4, 16),), dtype="fp32").graph
    assert any(op.target_name.startswith("shardplan.opaque") for op in graph.ops)
