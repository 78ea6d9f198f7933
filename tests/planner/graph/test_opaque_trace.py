"""Modules that cannot be traced become one op: which ones, what the op costs, and how it may be split."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.value_modules import BATCH, LABELS_ALONE, VALUE_MODULES, LoopedExperts
from torch import Tensor, nn

from planner import build_plan
from planner.errors import GraphFormatError, ModelError, UnmatchedKeyError
from planner.graph.op_graph import at_batch
from planner.graph.trace_module import TracedModule, trace_module
from planner.model_rewrites.opaque_op import OP_NAME, OpaqueArguments
from planner.profile.profile import profile_graph
from planner.wire.codec import read_graph, write_graph


def traced(module: nn.Module, *inputs: Any, **options: Any) -> TracedModule:
    return trace_module(module, example_inputs=inputs, batch=BATCH, dtype="fp32", **options)


def splits_of(module: TracedModule) -> dict[str, str]:
    graph = module.graph
    return {graph.calls[op.call].fqn: OpaqueArguments(*op.args).split for op in graph.ops if op.target_name == OP_NAME}


class Residual(nn.Module):
    """A module around one that cannot be traced, whose own code can."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.inner(x))


class ReturnsRows(nn.Module):
    """Its result has as many rows as values say."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum((1, 2)) > 0]


class MeanOfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = ReturnsRows()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x)
        return x + rows.sum() / len(rows)


class NormOfTheBatch(nn.Module):
    """Reads the values of its samples, and normalizes over all of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0)
        return x * 2 if x[0, 0, 0] > 0 else x


def test_only_what_cannot_be_traced_is_opaque() -> None:
    model = traced(Residual(LoopedExperts(16)), torch.randn(BATCH, 6, 16))
    assert splits_of(model) == {"inner": "0=0;0"}
    assert {"aten.linear.default", "aten.add.Tensor"} <= {op.target_name for op in model.graph.ops}
    assert model.any_batch


def test_the_module_around_takes_over_where_a_result_has_no_size() -> None:
    assert splits_of(traced(Residual(MeanOfRows()), torch.randn(BATCH, 6, 16))) == {"inner": ""}


class WithHead(nn.Module):
    """Branches on values, and calls its head, as the module around it does too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * 2 if x[0, 0, 0] > 0 else x)


class CallsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = WithHead()

    def forward(self, x: Tensor) -> Tensor:
        first = self.inner(x)
        return first + self.inner.head(x)


def test_the_module_around_takes_over_where_it_calls_what_is_inside() -> None:
    inputs = torch.randn(BATCH, 6, 16)
    assert splits_of(traced(CallsInside(), inputs)).keys() == {""}
    plan = build_plan(CallsInside(), example_inputs=(inputs,), cluster="1x2xtoy", dtype="fp32", batch=BATCH)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"


def test_samples_that_need_each_other_are_not_split() -> None:
    assert splits_of(traced(Residual(NormOfTheBatch()), torch.randn(BATCH, 6, 16))) == {"inner": ""}


class Noisy(nn.Module):
    """A derivative, which no trace has, on samples with noise: from ``draw``, given the samples."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.score = draw, nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.draw(x).requires_grad_())
        return torch.autograd.grad(self.score(x).tanh().sum(), x, create_graph=True)[0].norm(dim=1).mean()


@pytest.mark.parametrize(
    ("draw", "split"),
    [
        (lambda x: x + torch.rand(len(x), 1), "0=0;mean"),
        (lambda x: x * torch.bernoulli(x.sigmoid()), "0=0;mean"),
        (lambda x: x + torch.multinomial(x.softmax(1), 2).sum(1, keepdim=True), "0=0;mean"),
        (lambda x: torch.empty_like(x).exponential_() * x, "0=0;mean"),
        (lambda x: x + torch.randn(16), ""),  # all samples have this noise
        (lambda x: x + x[torch.randperm(len(x))], ""),  # samples are mixed
        (lambda x: x + x[torch.rand(len(x)).argsort()], ""),
    ],
)
def test_samples_are_split_where_each_has_random_numbers_of_its_own(
    draw: Callable[[Tensor], Tensor], split: str
) -> None:
    assert splits_of(traced(Noisy(draw), torch.randn(BATCH, 16))) == {"": split}


def test_modules_are_opaque_by_name() -> None:
    model = nn.Sequential(*(Residual(nn.Linear(16, 16)) for _ in range(3)))
    inputs = (torch.randn(BATCH, 6, 16),)
    assert splits_of(traced(model, *inputs)) == {}
    assert splits_of(traced(model, *inputs, opaque_modules=["*.inner"])) == dict.fromkeys(
        ("0.inner", "1.inner", "2.inner"), "0=0;0"
    )
    plan = build_plan(model, example_inputs=inputs, cluster="1x2xtoy", mesh="dp=2", dtype="fp32", opaque_modules=("0",))
    assert dict(plan.opaque_modules) == {"0": "0=0;0"}
    assert any("runs as one op" in note and ": 0." in note for note in plan.notes)
    with pytest.raises(UnmatchedKeyError, match="middle"):
        traced(model, *inputs, opaque_modules=["middle"])


def test_costs_are_those_of_the_ops_inside() -> None:
    # Every token takes two of four experts: 2 x 2 matrix multiplications of 16 x 32, and the router's of 16 x 4.
    model = traced(LoopedExperts(16), torch.randn(BATCH, 6, 16), opaque_modules=[""])
    (op,) = at_batch(model.graph, model.traced_batch, 100).ops
    costs = OpaqueArguments(*op.args).costs
    tokens = 100 * 6
    assert costs.flops == pytest.approx(tokens * (2 * 2 * 2 * 16 * 32 + 2 * 16 * 4), rel=0.02)
    # The input needs no gradient: that of the experts' first and of the router's multiplication is not computed.
    assert costs.backward_flops == pytest.approx(2 * costs.flops - tokens * (2 * 2 * 16 * 32 + 2 * 16 * 4), rel=0.02)
    profile = profile_graph(at_batch(model.graph, model.traced_batch, 100), flash_attention=False).ops[op.name]
    hidden = 4 * tokens * 2 * 32  # saved before and after each activation
    assert 2 * hidden < profile.saved_extra_nbytes < 6 * hidden


def test_a_graph_with_opaque_modules_is_sent_and_read() -> None:
    module = traced(Residual(LoopedExperts(16)), torch.randn(BATCH, 6, 16))
    document = write_graph(module)
    assert splits_of(read_graph(document)) == splits_of(module)
    text = json.dumps(document)
    for wrong in (text.replace('"0=0;0"', '"0=0;0 0"'), text.replace('"float32"', '"floaty"', 1)):
        if wrong != text:
            with pytest.raises(GraphFormatError):
                read_graph(json.loads(wrong))


@pytest.mark.parametrize("name", [name for name in VALUE_MODULES if name not in LABELS_ALONE])
def test_each_kind_has_an_opaque_module(name: str) -> None:
    module, inputs = VALUE_MODULES[name]()
    assert splits_of(traced(module, *inputs))


@pytest.mark.parametrize("name", LABELS_ALONE)
def test_a_mask_of_labels_leaves_nothing_opaque(name: str) -> None:
    module, inputs = VALUE_MODULES[name]()
    assert not splits_of(traced(module, *inputs))


class Branching(nn.Module):
    """Branches in its own forward, behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden * 2 if (hidden > 0).any() else hidden


class Counting(Branching):
    """Asks for the number of what a mask selects."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.layer(x)[x > 0]
        return rows.sum() / len(rows)


@pytest.mark.parametrize(
    ("module", "note"),
    [
        (
            nn.Sequential(nn.Linear(16, 16), Branching()),
            r": 1, since it branches.*, at test_opaque_trace.py:\d+",
        ),
        (Branching(), r"the whole model runs as one op: it branches on values.*, at test_opaque_trace.py:\d+"),
        (Counting(), r"the whole model runs as one op: it asks how many .* selects.*, at test_opaque_trace.py:\d+"),
    ],
)
def test_a_note_says_why_and_where(module: nn.Module, note: str) -> None:
    options: dict[str, Any] = {"cluster": "1x2xtoy", "mesh": "dp=2", "dtype": "fp32"}
    plan = build_plan(module, example_inputs=(torch.randn(BATCH, 6, 16),), **options)
    assert any(re.search(note, each) for each in plan.notes)


class Broken(nn.Module):
    def forward(this, x: Tensor) -> Tensor:
        return x @ x


def test_a_module_that_does_not_run_is_named_in_the_error() -> None:
    with pytest.raises(ModelError, match=r"in its module 'inner' \(Broken"):
        traced(Residual(Broken()), torch.randn(BATCH, 6, 16))


class WritesItsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(max=float(x.abs().max()) + 1.0)
        return x * self.scale


def test_a_module_that_writes_to_its_parameters_is_refused() -> None:
    with pytest.raises(ModelError):
        traced(Residual(WritesItsParameter()), torch.randn(BATCH, 6, 16))
