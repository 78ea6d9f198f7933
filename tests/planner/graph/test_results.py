"""What of a module is differentiated, and how its tensors are told apart at module boundaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.any_modules import Recurrent, Residual, SelfAttention
from support.losses_in_forward import TeacherAndStudent, TwoLosses
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from planner.errors import ModelError
from planner.graph.nested_graph import NestedGraph
from planner.graph.op_graph import OpGraph, at_batch
from planner.graph.trace_module import trace_module


def graph_of(module: nn.Module, *inputs: Tensor, **options: Any) -> OpGraph:
    return trace_module(module, example_inputs=inputs, dtype="fp32", **options).graph


class LossAndMore(nn.Module):
    """Returns a loss, and the result of a layer that does not lead to it."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"aside": self.unused(x).sum(), "loss": self.used(x).sum()}


class WithRotation(nn.Module):
    """Multiplies by numbers that are made without gradients, and depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            angles = torch.arange(16, device=x.device, dtype=torch.float32).expand(x.shape[0], 16).cos()
        return self.linear(x * angles).sum()


def test_without_a_loss_all_results_that_need_a_gradient_are_differentiated() -> None:
    graph = graph_of(nn.LSTM(16, 16, batch_first=True), torch.zeros(8, 4, 16))
    assert [(output.is_loss, output.is_result) for output in graph.outputs] == [(False, True)] * 3


def test_several_numbers_are_all_differentiated() -> None:
    graph = graph_of(TwoLosses(), torch.zeros(8, 16))
    assert [(output.is_loss, output.is_result) for output in graph.outputs] == [(False, True)] * 2


def test_a_number_named_loss_is_the_loss_and_nothing_else_needs_a_gradient() -> None:
    graph = graph_of(LossAndMore(), torch.zeros(8, 16))
    assert [(output.path, output.is_loss) for output in graph.outputs] == [("aside", False), ("loss", True)]
    trained = {names[0]: graph.values[value].requires_grad for value, names in graph.parameters.items()}
    assert trained == {"used.weight": True, "used.bias": True, "unused.weight": False, "unused.bias": False}


class OnlyItsShape(nn.Module):
    """Uses of one layer's result only the shape, of another's the largest place, of a third's the values."""

    def __init__(self) -> None:
        super().__init__()
        self.shape, self.place, self.detached, self.used = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        zeros = self.shape(x)[:, :8].new_zeros(x.shape[0], 16)
        chosen = x.gather(1, self.place(x).argmax(1, keepdim=True))
        return (self.used(x + zeros) + chosen + self.detached(x).detach()).sum()


def test_parameters_get_a_gradient_where_eager_gives_them_one() -> None:
    module = OnlyItsShape()
    module(torch.ones(8, 16)).backward()
    graph = graph_of(module, torch.zeros(8, 16))
    trained = {name for value, names in graph.parameters.items() if graph.values[value].requires_grad for name in names}
    assert trained == {name for name, parameter in module.named_parameters() if parameter.grad is not None}


def test_what_runs_without_gradients_is_op_by_op_where_it_depends_on_inputs() -> None:
    graph = graph_of(TeacherAndStudent(), torch.zeros(8, 16))
    linears = [op for op in graph.ops if op.target_name == "aten.linear.default"]
    assert [op.grad_enabled for op in linears] == [False, True]
    assert not any(isinstance(op.target, NestedGraph) for op in graph.ops)


def test_one_op_of_many_is_scaled_to_another_batch() -> None:
    (body,) = (op for op in graph_of(WithRotation(), torch.zeros(12, 16)).ops if isinstance(op.target, NestedGraph))
    open_graph = trace_module(WithRotation(), example_inputs=(torch.zeros(12, 16),), dtype="fp32")
    scaled = at_batch(open_graph.graph, open_graph.traced_batch, 6)
    (small,) = (op for op in scaled.ops if isinstance(op.target, NestedGraph))
    assert small.target()[0].shape == (6, 16)
    assert body.target != small.target


def test_one_tensor_given_three_times_crosses_the_boundary_once() -> None:
    graph = graph_of(SelfAttention(), torch.zeros(8, 4, 16))
    crossings = {
        crossing for op in graph.ops for row in op.crossings for crossing in row if crossing.direction == "input"
    }
    (inner,) = (c for c in crossings if c.direction == "input" and graph.calls[c.call].fqn == "attention")
    assert inner.paths == ("0", "1", "2")
    # Code that compares its arguments took the way for one tensor: one linear layer for query, key and value.
    assert sum(op.target_name == "aten.linear.default" for op in graph.ops) == 2


def test_a_module_that_does_nothing_returns_a_value_of_its_own() -> None:
    graph = graph_of(Residual(), torch.zeros(8, 4, 16))
    (alias,) = (op for op in graph.ops if op.target_name == "aten.alias.default")
    assert graph.calls[alias.call].fqn == "shortcut"
    add = next(op for op in graph.ops if op.target_name == "aten.add.Tensor")
    assert add.inputs[0] == alias.outputs[0]


def test_the_batch_may_be_a_later_dim_of_some_inputs() -> None:
    module = trace_module(Recurrent(), example_inputs=(torch.zeros(8, 6, 16), torch.zeros(1, 8, 16)), dtype="fp32")
    assert module.any_batch
    shapes = {model_input.path: module.graph.values[model_input.value].shape for model_input in module.graph.inputs}
    assert shapes == {"0": (module.traced_batch, 6, 16), "1": (1, module.traced_batch, 16)}


def test_sparse_gradients_are_refused_with_their_modules() -> None:
    module, ids = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)), torch.zeros(8, 3, dtype=torch.long)
    with pytest.raises(ModelError, match=r"^0: the gradients are sparse tensors .* Set sparse=False\."):
        graph_of(module, ids)
    graph_of(module, ids, phase="prefill")
    module[0].sparse = False
    module[1].sparse = True  # a name of the module's own
    graph_of(module, ids)


def test_training_without_a_backward_is_refused() -> None:
    frozen = nn.Linear(16, 16).requires_grad_(False)
    with pytest.raises(ModelError, match="nothing that the forward returns needs a gradient"):
        graph_of(frozen, torch.zeros(8, 16))
    graph_of(frozen, torch.zeros(8, 16), phase="prefill")


class Clipped(nn.Module):
    """Clips a weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight.data.clamp_(-1, 1)
        return self.inner(x).sum()


class Cast(nn.Module):
    """Runs a layer under autocast, as it would on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.inner(x).float().sum()


class CastOff(nn.Module):
    """Runs a layer with autocast off, named by its input's device and in a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    @torch.autocast("cuda", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(device_type=x.device.type, enabled=False):
            angles = torch.arange(16, device=x.device).to(x.dtype).cos()
        return (self.inner(x) * angles).sum()


def test_autocast_that_is_off_leaves_no_op() -> None:
    names = {op.target_name for op in graph_of(CastOff(), torch.zeros(8, 16)).ops}
    assert "aten.linear.default" in names
    assert not any("autocast" in name or "opaque" in name for name in names)


class Spoken(nn.Module):
    """Compares what it hears with texts; the number of frames follows from an input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, torch.ones(3 * len(x), dtype=torch.long), (lengths - 1) // 2 - 1, lengths // 8)


def test_a_loss_of_lengths_is_left_to_the_loop() -> None:
    with pytest.raises(ModelError, match="compute the CTC loss from them in the training loop"):
        graph_of(Spoken(), torch.zeros(8, 12, 16), torch.full((8,), 24))


class Flexible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x)[:, None, None].expand(-1, 2, 128, -1)
        return flex_attention(heads, heads, heads).sum()


@pytest.mark.parametrize(
    ("module", "what_to_do"),
    [
        (Clipped(), "Do not write to parameters"),
        (Cast(), "Leave torch.autocast out"),
        (Flexible(), "write it with F.scaled_dot_product_attention"),
    ],
)
def test_a_refusal_says_what_to_do(module: nn.Module, what_to_do: str) -> None:
    with pytest.raises(ModelError, match=what_to_do):
        graph_of(module, torch.zeros(8, 16))
