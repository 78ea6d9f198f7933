"""Graphs over the wire: the same graph comes out, the same plan is made of it, and nothing else is taken for one."""

from __future__ import annotations

import base64
import copy
import json
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch
from support import families
from support.graphs import canonical
from support.small_models import TINY_LLAMA
from torch import nn

from api.requests.model_configs import preset_names
from api.requests.model_registry import load_model
from planner.build import build_plan
from planner.errors import GraphFormatError, JobError, ModelError
from planner.graph.nested_graph import NestedGraph
from planner.graph.trace_module import TracedModule, trace_module
from planner.plan.sharding_plan import ShardingPlan
from planner.run.baselines import micro_batches_for
from planner.wire.allowed_ops import ALLOWED, find_op
from planner.wire.codec import graph_digest, read_graph, write_graph
from planner.wire.document import FORMAT, MAX_NBYTES, SCHEMA_FILE, json_schema, text_of

Document = dict[str, Any]


def plain(module: TracedModule) -> Document:
    """Return the document of ``module`` as it is when inflated."""
    document: Document = json.loads(text_of(write_graph(module)))
    return document


def packed(text: bytes) -> Document:
    return {"format": FORMAT, "zlib": base64.b64encode(zlib.compress(text)).decode()}


def without_timings(plan: ShardingPlan) -> str:
    data = plan.to_dict()
    # A graph alone cannot be run.
    del data["timings"], data["verification"], data["local_modules"]
    if data["solver"] is not None:
        data["solver"].pop("time_s", None)
    return json.dumps(data)


def assert_same(module: TracedModule, found: TracedModule) -> None:
    assert canonical(found.graph) == canonical(module.graph)
    assert list(found.graph.values.items()) == list(module.graph.values.items())
    assert [op.name for op in found.graph.ops] == [op.name for op in module.graph.ops]
    for field in ("name", "names", "fingerprint", "dtype", "samples", "traced_batch", "any_batch"):
        assert getattr(found, field) == getattr(module, field), field
    assert dict(found.tp_plan or {}) == dict(module.tp_plan or {})


@pytest.fixture(scope="module")
def mlp() -> TracedModule:
    module, kwargs = families.make("mlp", 8)
    return trace_module(module, example_inputs=kwargs, dtype="fp32")


@pytest.fixture(scope="module")
def llama() -> TracedModule:
    return trace_module(load_model({"hf_config": TINY_LLAMA}).module, batch=8, seq=16)


@pytest.fixture
def document(mlp: TracedModule) -> Document:
    return plain(mlp)


# --- what is written is read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [None, 2])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_comes_back_as_it_was(family: str, micro_batches: int | None) -> None:
    module, kwargs = families.make(family, 8)
    traced = trace_module(module, example_inputs=kwargs, micro_batches=micro_batches)
    assert_same(traced, read_graph(write_graph(traced)))


CHECKED_BY_CI = ("gpt2", "llama-3.1-8b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHECKED_BY_CI else pytest.mark.slow) for name in preset_names()]
)
def test_a_preset_comes_back_as_it_was(name: str) -> None:
    source = load_model(name, seq=512)
    traced = trace_module(source.module, batch=4, seq=source.seq)
    sent = write_graph(traced)
    assert_same(traced, read_graph(json.loads(json.dumps(sent))))
    assert len(sent["zlib"]) < 300_000


class Scaled(nn.Module):
    """Part of what it computes takes no gradients, and depends on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = torch.arange(x.shape[-1], device=x.device).to(torch.float32) + 1.0
        return self.linear(x / scale).sum()


def test_a_block_without_gradients_comes_back_as_data() -> None:
    traced = trace_module(Scaled(), example_inputs=(torch.zeros(4, 8),), dtype="fp32", micro_batches=1)
    bodies = [op.target for op in read_graph(write_graph(traced)).graph.ops if isinstance(op.target, NestedGraph)]
    assert bodies
    assert bodies == [op.target for op in traced.graph.ops if isinstance(op.target, NestedGraph)]


def test_document_is_the_same_each_time_and_may_go_uncompressed(mlp: TracedModule, document: Document) -> None:
    sent = write_graph(mlp)
    assert write_graph(mlp) == sent
    assert_same(mlp, read_graph(document))
    assert graph_digest(sent) == graph_digest(sent) != graph_digest({**document, "ops": []})


def test_document_holds_no_weights_and_no_code(mlp: TracedModule) -> None:
    text = text_of(write_graph(mlp)).decode()
    assert "forward" not in text
    assert len(text) < 10_000, "256 x 64 weights would take more"


def test_published_schema_is_the_readers_and_fits_a_document(llama: TracedModule) -> None:
    published = json.loads(SCHEMA_FILE.read_text())
    assert published == json_schema(), f"write it anew: python -m planner.wire.document > {SCHEMA_FILE.name}"
    jsonschema.validate(plain(llama), published)


# --- what is read is planned ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2, "mesh": "dp=2,tp=2"}, {"planner": "random:3"}])
def test_plan_of_a_graph_is_the_plan_of_its_module(options: dict[str, Any]) -> None:
    module, kwargs = families.make("mlp", 8)
    local = build_plan(module, cluster="1x4xtoy", example_inputs=kwargs, dtype="fp32", **options)
    count = micro_batches_for(options.get("planner", "ilp"), options.get("micro_batches"))
    traced = trace_module(module, example_inputs=kwargs, dtype="fp32", micro_batches=count)
    sent = read_graph(write_graph(traced))
    assert without_timings(build_plan(sent, cluster="1x4xtoy", dtype="fp32", **options)) == without_timings(local)


@pytest.mark.parametrize("planner", ["tensor-parallel", "fully-sharded"])
def test_baseline_of_a_graph_is_the_baseline_of_its_module(planner: str) -> None:
    module = load_model({"hf_config": TINY_LLAMA}).module
    job: dict[str, Any] = {"cluster": "1x4xtoy", "mesh": "dp=2,tp=2", "batch": 8, "ac": "none", "planner": planner}
    sent = read_graph(write_graph(trace_module(module, batch=8, seq=16)))
    assert without_timings(build_plan(sent, seq=16, **job)) == without_timings(build_plan(module, seq=16, **job))


def test_graph_is_planned_only_for_the_job_that_it_was_traced_for(mlp: TracedModule) -> None:
    with pytest.raises(JobError, match="traced in fp32, and the job is in bf16"):
        build_plan(mlp, cluster="1x4xtoy")
    module, kwargs = families.make("mlp", 8)
    alone = trace_module(module, example_inputs=kwargs, dtype="fp32", micro_batches=2)
    with pytest.raises(JobError, match="traced with 4 samples, and the job needs 8 samples"):
        build_plan(alone, cluster="1x4xtoy", dtype="fp32", micro_batches=1)
    with pytest.raises(JobError, match="micro-batches of any size"):
        build_plan(alone, cluster="1x4xtoy", dtype="fp32")
    with pytest.raises(JobError, match="takes no example inputs"):
        build_plan(mlp, cluster="1x4xtoy", dtype="fp32", example_inputs=kwargs)


# --- what cannot be sent -------------------------------------------------------------------------------------------


@torch.library.custom_op("graph_json_test::twice", mutates_args=())
def _twice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@_twice.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.graph_json_test.twice(x)


def test_op_of_ones_own_is_refused_before_it_is_sent() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Twice())
    traced = trace_module(module, example_inputs=(torch.zeros(8, 4),))
    with pytest.raises(ModelError, match=r"in module '1' cannot be sent: it runs graph_json_test.twice") as caught:
        write_graph(traced)
    assert caught.value.module == "1"


# --- what is no graph ----------------------------------------------------------------------------------------------


def op_of(document: Document, name: str) -> Document:
    """Return the first op of ``document`` that runs ``name``."""
    found: Document = next(op for op in document["ops"] if op.get("op") == name)
    return found


def change(*path: Any, to: Any) -> Callable[[Document], None]:
    """Return what sets the place ``path`` of a document."""

    def apply(document: Document) -> None:
        place: Any = document
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return apply


def linear(field: str, value: Any) -> Callable[[Document], None]:

    def apply(document: Document) -> None:
        op = op_of(document, "aten.linear.default")
        op[field] = value
        if field == "args":
            op.pop("crossings")  # of the values that are gone

    return apply


MALFORMED: dict[str, tuple[Callable[[Document], None], str]] = {
    "format": (change("format", to="pickle"), "format"),
    "version": (change("format_version", to=2), "format_version"),
    "torch": (change("torch", to="1.0"), "traced by torch 1.0"),
    "field of its own": (change("code", to="import os"), "code"),
    "missing part": (lambda document: document.pop("ops") and None, "ops"),
    "unknown op": (linear("op", "aten.linear.nothing"), "is no op that is known"),
    "function": (linear("op", "os.system"), "is no op that is known"),
    "attribute of torch.ops": (linear("op", "aten.__class__.default"), "is no op that is known"),
    "op of another library": (linear("op", "shardplan.boundary.default"), "is no op that is known"),
    "op that reads files": (linear("op", "aten.from_file.default"), "is no op that is known"),
    "op that writes into another tensor": (linear("op", "aten.add.out"), "is no op that is known"),
    "no op": (lambda document: op_of(document, "aten.linear.default").pop("op") and None, "one of op and body"),
    "no such body": (lambda document: document["ops"][0].update(op=None, body=7), "no such body"),
    "too few arguments": (linear("args", []), "needs an argument 'input'"),
    "too many arguments": (linear("args", [1.0] * 9), "takes 3 arguments and is given 9"),
    "unknown argument": (linear("kwargs", {"device": {"device": "meta"}}), "'device'"),
    "argument of another type": (linear("args", ["text", "text"]), "'input' .* is no Tensor"),
    "dangling value": (linear("args", [{"value": "nowhere"}]), "the unknown value 'nowhere'"),
    "argument that is an object": (linear("args", [{"__reduce__": "os.system"}]), "__reduce__"),
    "huge number": (linear("args", [2**64]), "63 bits"),
    "deep list": (linear("args", [[[[[[[[[1]]]]]]]]]), "nested deeper"),
    "call out of range": (linear("call", 99), "no such call"),
    "crossing out of range": (linear("crossings", [[99], [], []]), "no crossing 99"),
    "crossings of other values": (linear("crossings", [[]]), "there are 1 of 3 values"),
    "output of another op": (lambda d: d["ops"][1].update(outputs=d["ops"][0]["outputs"]), "is there before the op"),
    "output that is no value": (linear("outputs", ["nowhere"]), "is no value of the graph"),
    "more outputs": (lambda d: d["ops"][0]["outputs"].append(d["ops"][1]["outputs"][0]), "makes 1 tensors here"),
    "no output": (linear("outputs", []), "outputs"),
    "op twice": (lambda document: document["ops"].append(document["ops"][0]), "a name is there twice"),
    "value twice": (lambda document: document["values"].append(document["values"][0]), "is there twice"),
    "value of no op": (lambda document: document["ops"].pop() and None, "no op makes"),
    "negative dim": (change("values", 0, "shape", to=[-1]), "greater than or equal to 0"),
    "vast tensor": (change("values", 0, "shape", to=[2**40, 2**40]), "more than"),
    "high rank": (change("values", 0, "shape", to=[1] * 40), "at most 16"),
    "no dtype": (change("values", 0, "dtype", to="__class__"), "is no dtype"),
    "kind that is none": (change("values", 0, "kind", to="code"), "kind"),
    "calls in a circle": (change("calls", 0, 1, to=0), "the first call is the root's"),
    "call within a later one": (change("calls", 1, 1, to=3), "each other one is within another"),
    "call of no module": (change("calls", 1, 0, to=99), "there is no module 99"),
    "parameter of no name": (change("parameters", to=[]), "has no name"),
    "parameter of another name": (change("parameters", 0, "names", to=["x"]), "has no 'x'"),
    "input that is none": (change("inputs", 0, "value", to="x" * 20), "there is no input"),
    "two losses": (lambda document: document["outputs"].append(document["outputs"][0]), "more than one loss"),
    "loss that is none": (lambda d: d["outputs"][0].update(value=d["inputs"][0]["value"]), "a loss is one number"),
    "text for a number": (change("trace", "batch", to="12"), "integer"),
    "any batch from another": (change("trace", "batch", to=2), "a graph for any batch is traced at 99991"),
    "batch of nothing": (change("trace", "batch", to=0), "greater than or equal to 1"),
    "op that does not run": (linear("args", [{"value": "x"}, {"value": "labels"}]), "does not run"),
    "shape that the op does not make": (
        lambda d: next(v for v in d["values"] if v["name"] == "linear").update(shape=[5, 5]),
        "which is not what it says",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_document_is_refused_at_its_place(name: str, document: Document) -> None:
    damage, said = MALFORMED[name]
    damaged = copy.deepcopy(document)
    damage(damaged)
    for form in (damaged, packed(json.dumps(damaged).encode())):
        with pytest.raises(GraphFormatError, match=said) as caught:
            read_graph(form)
        assert caught.value.what_to_do
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "text",
        {},
        {"format": FORMAT},
        {"format": FORMAT, "zlib": 3},
        {"format": FORMAT, "zlib": "%%%"},
        {"format": FORMAT, "zlib": "AAAA"},
        {"format": FORMAT, "zlib": "", "more": 1},
        packed(b""),
        packed(b"\x80\x04\x95"),
        packed(b"[" * 100_000),
        packed(b'{"format": ' * 100_000),
        packed(b'{"format": "shardplan-graph", "trace": {"batch": ' + b"9" * 100_000 + b"}}"),
        packed(b'{"format": NaN}'),
    ],
    ids=str,
)
def test_what_is_no_document_is_refused(data: Any) -> None:
    with pytest.raises(GraphFormatError):
        read_graph(data)


def test_cut_off_or_lengthened_document_is_refused(mlp: TracedModule) -> None:
    text = base64.b64decode(write_graph(mlp)["zlib"])
    for damaged in (text[:-5], text + b"more", text[: len(text) // 2]):
        with pytest.raises(GraphFormatError):
            read_graph({"format": FORMAT, "zlib": base64.b64encode(damaged).decode()})


@pytest.mark.parametrize("filling", [b"0", b"[],", b'"a",'])
def test_bomb_is_refused_before_it_fills_the_memory(filling: bytes) -> None:
    bomb = packed(b'{"format": "shardplan-graph", "ops": [' + filling * (8 * MAX_NBYTES // len(filling)))
    tracemalloc.start()
    try:
        with pytest.raises(GraphFormatError, match="more than"):
            read_graph(bomb)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 4 * MAX_NBYTES


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten.unbind.int", []),
        ("aten.split.Tensor", [1]),
        ("aten.chunk.default", [2**40]),
        ("aten.tensor_split.sections", [2**40]),
    ],
)
def test_op_that_would_make_a_billion_tensors_is_not_run(document: Document, op: str, args: list[Any]) -> None:
    document["values"].append(
        {"name": "vast", "shape": [2**40], "dtype": "bool", "kind": "plain", "requires_grad": False}
    )
    document["values"].append({"name": "piece", "shape": [], "dtype": "bool"})
    document["ops"].append(
        {"name": "bomb", "op": op, "args": [{"value": "vast"}, *args], "call": 0, "outputs": ["piece"]}
    )
    with pytest.raises(GraphFormatError, match="makes 1099511627776 tensors here, and it has 1"):
        read_graph(document)


def test_op_may_not_make_a_tensor_of_this_machine(document: Document) -> None:
    op = {"name": "bomb", "op": "aten.zeros.default", "args": [[2**40]], "call": 0, "outputs": ["vast"]}
    document["values"].append({"name": "vast", "shape": [2**40], "dtype": "float32"})
    document["ops"].append(op)
    with pytest.raises(GraphFormatError, match="says no device"):
        read_graph(document)
    op["kwargs"] = {"device": {"device": "cpu"}, "dtype": {"dtype": "float32"}}
    tracemalloc.start()
    read_graph(document)  # made on the meta device, whatever the document says
    assert tracemalloc.get_traced_memory()[1] < MAX_NBYTES
    tracemalloc.stop()


def test_every_allowed_name_is_of_an_op_that_torch_has() -> None:
    registered = {name.partition(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}
    assert registered >= ALLOWED
    assert find_op("aten.linear.default") is torch.ops.aten.linear.default
