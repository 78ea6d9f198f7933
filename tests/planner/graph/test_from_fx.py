"""What tracing yields: every road to a graph, any batch from one trace, ties, boundaries, and refusals with reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import families
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from planner.errors import ModelError
from planner.graph.capture import export, to_meta
from planner.graph.example_inputs import meta_inputs, with_batch
from planner.graph.from_fx import trace
from planner.graph.op_graph import Crossing, OpGraph, at_batch
from planner.graph.trace_module import TRACE_BATCH, trace_module
from planner.strategies.dtensor_rules import mesh_without_groups


def graph_of(module: nn.Module, inputs: dict[str, Any]) -> OpGraph:
    return trace(to_meta(module, None), meta_inputs(inputs))


def as_data(graph: OpGraph) -> dict[str, Any]:
    """Return the graph as values that can be compared."""
    ops = [
        (op.name, op.target, op.args, dict(op.kwargs), op.call, op.inputs, op.crossings, op.outputs) for op in graph.ops
    ]
    return {
        "ops": ops,
        "values": dict(graph.values),
        "calls": graph.calls,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "parameters": dict(graph.parameters),
        "edges": sorted((a, b, data["value"]) for a, b, data in graph.digraph.edges(data=True)),
    }


@pytest.mark.parametrize("family", families.FAMILIES)
def test_one_trace_stands_for_every_batch(family: str) -> None:
    module, kwargs = families.make(family, 8)
    meta, inputs = to_meta(module, torch.bfloat16), meta_inputs(kwargs)
    open_trace = trace(meta, with_batch(inputs, 8, TRACE_BATCH))
    for batch in (2, 12):
        expected = as_data(trace(meta, with_batch(inputs, 8, batch)))
        found = as_data(at_batch(open_trace, TRACE_BATCH, batch))
        for part, wanted in expected.items():
            assert found[part] == wanted, f"{part} at batch {batch}"
    assert all(TRACE_BATCH not in value.shape for value in at_batch(open_trace, TRACE_BATCH, 4).values.values())


def test_an_mlp_op_by_op() -> None:
    module, kwargs = families.make("mlp", 4)
    graph = graph_of(module, kwargs)
    assert [(op.target_name, graph.calls[op.call].fqn) for op in graph.ops] == [
        ("aten.linear.default", "fc1"),
        ("aten.relu.default", "relu"),
        ("aten.linear.default", "fc2"),
        ("aten.linear.default", "head"),
        ("aten.cross_entropy_loss.default", ""),
    ]
    first, relu = graph.ops[:2]
    assert first.crossings[0] == (
        Crossing(call=0, direction="input", path="x"),
        Crossing(call=1, direction="input", path="0"),
    )
    assert relu.crossings[0] == (
        Crossing(call=1, direction="output", path=""),
        Crossing(call=2, direction="input", path="0"),
    )
    assert graph.values[first.outputs[0]].shape == (4, 256)
    assert [i.path for i in graph.inputs] == ["x", "labels"]
    assert [(o.is_loss, graph.values[o.value].shape) for o in graph.outputs] == [(True, ())]
    kinds = {name: value.kind for name, value in graph.values.items()}
    assert sorted(kinds.values()).count("parameter") == 6
    assert not graph.values[graph.inputs[0].value].requires_grad


def test_tied_parameters_are_one_value() -> None:
    module, kwargs = families.make("gpt2", 4)
    graph = graph_of(module, kwargs)
    names = {frozenset(aliases) for aliases in graph.parameters.values()}
    assert frozenset({"transformer.wte.weight", "lm_head.weight"}) in names
    tied = next(value for value, aliases in graph.parameters.items() if "lm_head.weight" in aliases)
    users = [op.target_name for op in graph.ops if tied in op.inputs]
    assert users == ["aten.embedding.default", "aten.linear.default"]
    assert len(graph.parameters) == len(list(module.parameters()))


def test_what_depends_on_no_input_is_plain() -> None:
    module, kwargs = families.make("llama", 4)
    graph = graph_of(module, kwargs)
    plain = [op for op in graph.ops if all(graph.values[name].kind == "plain" for name in op.outputs)]
    assert plain, "rotary embeddings are computed from positions alone"
    for op in plain:
        assert all(graph.values[name].kind == "plain" for name in op.inputs)


def test_meta_copies_keep_ties_and_leave_the_module_alone() -> None:
    module, _ = families.make("gpt2", 4, "cpu")
    before = module.lm_head.weight
    copy = to_meta(module, torch.bfloat16)
    assert copy.lm_head.weight is copy.transformer.wte.weight
    assert (copy.lm_head.weight.device.type, copy.lm_head.weight.dtype) == ("meta", torch.bfloat16)
    assert module.lm_head.weight is before
    assert (before.device.type, before.dtype) == ("cpu", torch.float32)


class NoExport(nn.Module):
    """Refuses to be exported, as code that branches on the tracer does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu, self.head = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
        self.again = self.fc

    def forward(self, x: torch.Tensor, labels: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if torch.compiler.is_exporting():
            raise NotImplementedError("this layer has no export")
        return nn.functional.cross_entropy(self.head(self.relu(self.fc(x) * scale)), labels)


class Exportable(NoExport):
    def forward(self, x: torch.Tensor, labels: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.relu(self.fc(x) * scale)), labels)


def test_torch_fx_sees_what_export_would() -> None:
    inputs = {"x": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.long)}
    found, expected = as_data(graph_of(NoExport(), inputs)), as_data(graph_of(Exportable(), inputs))
    for part, wanted in expected.items():
        assert found[part] == wanted, part
    positional = meta_inputs((inputs["x"], inputs["labels"]))
    graph = trace(to_meta(NoExport(), None), positional)
    assert [i.path for i in graph.inputs] == ["0", "1"]


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Branching()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x)


def test_what_neither_can_trace_is_refused_by_name() -> None:
    with pytest.raises(ModelError) as caught:
        trace(Outer(), meta_inputs((torch.zeros(4, 8),)))
    message = str(caught.value)
    assert "cannot trace Outer" in message
    assert "module 'gate' (Branching)" in message
    assert "torch.export says" in message
    assert "torch.fx says" in message
    assert "control flow" in message


def test_a_module_that_fails_on_its_inputs_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="same reduction dim"):
        trace(to_meta(nn.Sequential(nn.Linear(8, 4)), None), meta_inputs((torch.zeros(4, 7),)))


class Holding(nn.Module):
    """A module that holds more than modules and tensors, some of it twice, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.also_sizes = self.sizes
        self.settings = {"width": 8}
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again = [self.first]
        self.second.weight = self.first.weight
        self.alias = self.first
        self.register_forward_hook(lambda *_: None)


class Counted(nn.Module):
    """A module with a way of its own to be copied."""

    def __init__(self, copies: int = 0) -> None:
        super().__init__()
        self.copies = copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
        return Counted(self.copies + 1)


def test_a_copy_on_meta_holds_what_the_module_does_and_nothing_of_it() -> None:
    module = nn.Sequential(Holding(), Counted())
    copy, counted = to_meta(module, torch.bfloat16)
    original = module[0]
    assert isinstance(copy, Holding)
    assert isinstance(counted, Counted)
    assert counted.copies == 1
    assert copy.also_sizes is copy.sizes
    assert copy.sizes is not original.sizes
    assert copy.settings == {"width": 8}
    assert copy.settings is not original.settings
    assert copy.again[0] is copy.first
    assert copy.alias is copy.first
    assert copy.first is not original.first
    assert copy.second.weight is copy.first.weight
    assert copy.first.weight.is_meta
    assert copy.first.weight.dtype == torch.bfloat16
    assert len(copy._forward_hooks) == 1
    assert copy._forward_hooks is not original._forward_hooks
    assert list(vars(copy)) == list(vars(original))


class TakesWhatIsPositive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body = nn.Linear(4, 1), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x[self.gate(x).squeeze(-1) > 0]).sum()


def test_a_shape_that_depends_on_values_is_refused_by_op_and_module() -> None:
    module = nn.Sequential(nn.Linear(4, 4), TakesWhatIsPositive())
    with pytest.raises(ModelError, match=r"aten\.index\.Tensor in 1 returns as many elements as values say") as caught:
        graph_of(module, {"input": torch.randn(8, 4)})
    assert caught.value.module == "1"


class Packed(nn.Parameter):
    """Casts itself, as quantized weights of other libraries do."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self


class Tagged(nn.Parameter):
    """A parameter as any other."""


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_parts_that_no_trace_reads_are_refused_by_name_all_at_once() -> None:
    script, packed, sharded = torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 4)
    packed.weight, packed.bias = Packed(packed.weight.data), Packed(packed.bias.data)
    whole = DTensor.from_local(sharded.weight.data, mesh_without_groups([4]), [Replicate()])
    sharded.weight = nn.Parameter(whole)
    module = nn.Sequential(nn.Linear(4, 4), script, nn.LazyLinear(4, bias=False), packed, sharded)
    with pytest.raises(ModelError) as caught:
        trace_module(module, example_inputs=(torch.randn(8, 4),))
    said = str(caught.value)
    assert "1 is TorchScript" in said
    assert "2.weight is a lazy parameter" in said
    assert "Call the module once" in said
    assert "3.weight (and 1 more) is a" in said
    assert "Packed, a tensor with ops of its own" in said
    assert "4.weight is a DTensor" in said
    assert caught.value.module == "1"


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_is_planned_once_it_was_called_and_tags_are_no_fault() -> None:
    module = nn.LazyLinear(4)
    with pytest.raises(ModelError, match="weight") as caught:
        trace_module(module, example_inputs=(torch.randn(8, 4),))
    assert caught.value.module == ""
    module(torch.randn(2, 4))
    module.weight = Tagged(module.weight.data)
    assert trace_module(module, example_inputs=(torch.randn(8, 4),)).graph.ops


class KeepsItsDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("mixing", torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.mixing @ self.body(x)).sum()


def test_a_buffer_in_another_dtype_is_refused_with_what_to_do_and_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    module, inputs = KeepsItsDtype(), (torch.randn(2, 4, 4),)
    with pytest.raises(ModelError) as caught:
        trace_module(module, example_inputs=inputs)
    assert "dtype='fp32'" in caught.value.what_to_do
    assert "Traceback" not in "".join(capfd.readouterr())
    assert trace_module(module, example_inputs=inputs, dtype="fp32").graph.ops


class UnderTwoNames(nn.Module):
    """Registers one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.second, self.head = self.first, nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def test_torch_export_captures_a_module_under_two_names() -> None:
    captured = export(to_meta(UnderTwoNames(), None), meta_inputs((torch.zeros(4, 8),)))
    assert [call.fqn for call in captured.calls] == ["", *("first", "first.0", "first.1") * 2, "head"]
