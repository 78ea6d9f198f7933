"""What hostile requests are made of, and a module that nobody may import."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import families
from support.small_models import TINY_LLAMA, TINY_REQUEST

from planner.graph.trace_module import trace_module
from planner.wire.codec import write_graph
from planner.wire.document import text_of

JSON = {"Content-Type": "application/json"}
BAIT = "hostile_bait"
"""A module on the path of the processes, whose import leaves a file."""
DIGITS = "9" * 5000
"""More than Python turns into an int."""


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
"""YAML of 10^12 texts."""


Document = dict[str, Any]


def plan(**change: Any) -> bytes:
    return json.dumps({**TINY_REQUEST, **change}).encode()


def config(**change: Any) -> bytes:
    return plan(model={"hf_config": {**TINY_LLAMA, **change}})


def check(configuration: str, **change: Any) -> bytes:
    request = {"model": "gpt2", "cluster": "1x4xtoy", "batch": 8, "seq": 64, "configuration": configuration}
    return json.dumps({**request, **change}).encode()


def relu(document: Document) -> Document:
    found: Document = next(op for op in document["ops"] if "relu" in op["op"])
    return found


def made_by_relu(document: Document) -> Document:
    name = relu(document)["outputs"][0]
    found: Document = next(value for value in document["values"] if value["name"] == name)
    return found


def graph_body(graph: object) -> bytes:
    settings = {"cluster": "1x4xtoy", "mesh": "dp=4", "planner": "data-parallel", "dtype": "fp32"}
    return json.dumps({"model": {"graph": graph}, **settings}).encode()


def changed(document: Document, change: Callable[[Document], object]) -> Document:
    copied = copy.deepcopy(document)
    change(copied)
    return copied


def traced_document() -> Document:
    """Return the graph of an MLP as a client sends it."""
    module, kwargs = families.make("mlp", 8)
    traced = trace_module(module, example_inputs=kwargs, dtype="fp32")
    found: Document = json.loads(text_of(write_graph(traced)))
    return found


@contextmanager
def baited(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the path on which processes find a module that nobody may import."""
    marker = folder / "was-imported"
    (folder / f"{BAIT}.py").write_text(f"open({str(marker)!r}, 'w')\nModel = run = print\n")
    yield {"PYTHONPATH": str(folder)}
    assert not marker.exists()
