"""Documents that were damaged at random: each is read, or refused as a client's error, whatever was done to it."""

from __future__ import annotations

import base64
import copy
import json
import resource
import sys
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import nn

from api.requests.errors import problem_of
from planner.errors import GraphFormatError
from planner.graph.trace_module import TracedModule, trace_module
from planner.wire.allowed_ops import find_op
from planner.wire.codec import read_graph, write_graph
from planner.wire.document import FORMAT, text_of

BAIT = "graph_fuzz_bait"
"""A module that lies on the path and is never to be imported."""

MOST_GROWTH_KB = 1_000_000
MANY = 10_500
"""Damaged documents; three in a hundred are still graphs, so that 10,000 and more are none."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).split(16, dim=-1))
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(heads.transpose(1, 2).flatten(2))


class Zoo(nn.Module):
    """A bit of everything that a document can hold: tied weights, blocks, a body, constants, lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(32, 16), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(16))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            steps = torch.arange(ids.shape[1], device=ids.device)
            mask = torch.where(steps[:, None] >= steps[None, :], 0.0, -torch.inf)
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def document() -> dict[str, Any]:
    with torch.device("meta"):
        module = Zoo()
    ids = torch.zeros(8, 12, dtype=torch.long, device="meta")
    found: dict[str, Any] = json.loads(text_of(write_graph(trace_module(module, example_inputs=(ids, ids)))))
    return found


Place = tuple[Any, ...]


def places(item: Any, at: Place = ()) -> Iterator[Place]:
    yield at
    steps = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    for step, part in steps:
        yield from places(part, (*at, step))


@cache
def all_places() -> list[Place]:
    return [place for place in places(document()) if place]


@cache
def all_ops() -> list[str]:
    """Return the names of all of torch's ops, most of which no graph may hold."""
    names = sorted(torch._C._dispatch_get_all_op_names())
    dotted = [name.replace("::", ".", 1) for name in names]
    return [name if name.count(".") > 1 else f"{name}.default" for name in dotted]


@cache
def allowed_ops() -> list[str]:
    return [name for name in all_ops() if find_op(name) is not None]


def look_up(item: Any, place: Place) -> Any:
    for step in place:
        item = item[step]
    return item


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from([2**31, 2**40, 2**63, -(2**70), 10**400, 99_991, 1e308, -0.0, 0.5]),
    st.text(max_size=8),
    st.sampled_from(["os.system", BAIT, f"{BAIT}.run", "../../etc/passwd", "__class__", "a" * 5000, "\x00", "\ud800"]),
    st.sampled_from([[], {}, [[]], {"value": "ids"}, {"tuple": [1]}, {"dtype": "int8"}, {"device": "cpu"}]),
    st.recursive(st.integers(0, 3), lambda inner: st.lists(inner, max_size=3), max_leaves=12),
    st.deferred(lambda: st.sampled_from(all_places()).map(lambda place: look_up(document(), place))),
)


def damage(draw: st.DrawFn, damaged: dict[str, Any]) -> None:
    """Do one thing to a document. Junk is copied, since it may be a part of `document`, which is made once."""
    place = draw(st.sampled_from(all_places()))
    try:
        owner = look_up(damaged, place[:-1])
        what = draw(st.sampled_from(["replace", "replace", "remove", "repeat", "shift", "add", "op", "arguments"]))
        if what == "remove":
            del owner[place[-1]]
        elif what == "repeat" and isinstance(owner, list):
            owner.insert(place[-1], copy.deepcopy(owner[place[-1]]))
        elif what == "shift" and isinstance(owner[place[-1]], int):
            owner[place[-1]] += draw(st.integers(-2, 2))
        elif what == "add" and isinstance(owner, dict):
            owner[draw(st.text(max_size=5))] = copy.deepcopy(draw(JUNK))
        elif what == "op":
            op = draw(st.sampled_from(damaged["ops"]))
            op["op"] = draw(st.sampled_from(all_ops()) | st.sampled_from(allowed_ops()))
        elif what == "arguments":
            op = draw(st.sampled_from(damaged["ops"]))
            op["args"] = [*op.get("args", []), *copy.deepcopy(draw(st.lists(JUNK, max_size=3)))]
        else:
            owner[place[-1]] = copy.deepcopy(draw(JUNK))
    except (LookupError, TypeError, AttributeError):
        event("the place was gone")  # an earlier blow took it away


@st.composite
def damaged_documents(draw: st.DrawFn) -> Any:
    damaged = copy.deepcopy(document())
    for _ in range(draw(st.integers(1, 3))):
        damage(draw, damaged)
    form = draw(st.sampled_from(["plain", "packed", "torn"]))
    if form == "plain":
        return damaged
    text = json.dumps(damaged).encode()
    if form == "torn":
        at = draw(st.integers(0, len(text) - 1))
        text = text[:at] + draw(st.binary(max_size=3)) + text[at + draw(st.integers(0, 3)) :]
    return {"format": FORMAT, "zlib": base64.b64encode(zlib.compress(text, 1)).decode()}


def check(data: Any) -> bool:
    """Read ``data``: a graph, or a client's error that says what is wrong; return whether it was refused."""
    refusal: GraphFormatError | None = None
    try:
        found = read_graph(data)
    except GraphFormatError as error:
        refusal = error
    if refusal is None:
        assert isinstance(found, TracedModule)
        event("read")
        return False
    problem = problem_of(refusal)
    assert problem["status"] == 422
    assert problem["type"] == "urn:shardplan:graph-format-error"
    assert 0 < len(refusal.detail) < 2000
    assert refusal.what_to_do
    json.dumps(problem).encode()
    event("refused")
    return True


@pytest.fixture
def _bait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{BAIT}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    assert BAIT not in sys.modules


COMMON: dict[str, Any] = {
    "database": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@pytest.mark.usefixtures("_bait")
@settings(max_examples=300, **COMMON)
@given(damaged_documents())
def test_damaged_document_is_read_or_refused(data: Any) -> None:
    check(data)


@pytest.mark.slow
@pytest.mark.usefixtures("_bait")
def test_ten_thousand_documents_that_are_no_graphs_are_refused_in_bounded_memory() -> None:
    read_graph(document())
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0

    @settings(max_examples=MANY, **COMMON)
    @given(damaged_documents())
    def each(data: Any) -> None:
        nonlocal refused
        refused += check(data)

    each()
    assert refused >= 10_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < MOST_GROWTH_KB
