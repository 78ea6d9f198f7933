"""Vocabularies are rounded up in the graph that is planned, wherever their length occurs, and only where ops allow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_model import ClusterSpec
from planner.graph.op_graph import OpGraph
from planner.graph.trace_module import trace_module
from planner.graph.uneven_lengths import with_rounded_lengths


class Words(nn.Module):
    """An embedding and a head, with what is made of the logits in between."""

    def __init__(self, vocabulary: int, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 16)
        self.head = nn.Linear(16, vocabulary)
        self.use = use

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.use(self.head(self.table(tokens)))
        return F.cross_entropy(logits.view(-1, self.head.out_features), labels.view(-1))


def rounded(
    vocabulary: int, use: Callable[[Tensor], Tensor] = lambda logits: logits, cluster: str = "1x4xtoy"
) -> OpGraph:
    tokens = torch.randint(0, 64, (8, 12))
    traced = trace_module(Words(vocabulary, use), example_inputs=(tokens, tokens), dtype="fp32")
    return with_rounded_lengths(traced, ClusterSpec.parse(cluster)).graph


def lengths(graph: OpGraph) -> set[int]:
    return {length for value in graph.values.values() for length in value.shape}


def test_every_tensor_and_argument_has_the_longer_length() -> None:
    graph = rounded(257)
    assert graph.rounded == {268: 257}
    assert 257 not in lengths(graph)
    (view,) = [op for op in graph.ops if op.target_name == "aten.view.default" and op.args[1][-1] != -1]
    assert view.args[1][-1] == 268


def test_elementwise_ops_may_read_the_logits() -> None:
    assert rounded(257, lambda logits: 30 * torch.tanh(logits.float() / 30)).rounded == {268: 257}


@pytest.mark.parametrize(
    "use",
    [
        lambda logits: logits.softmax(-1),
        lambda logits: logits.sort(-1).values,
        lambda logits: logits - logits.mean(-1, True),
    ],
    ids=["softmax", "sort", "mean"],
)
def test_a_vocabulary_that_other_ops_read_is_left(use: Callable[[Tensor], Tensor]) -> None:
    assert rounded(257, use).rounded == {}


@pytest.mark.parametrize("vocabulary", [256, 130], ids=["divided", "too short"])
def test_a_vocabulary_that_need_not_or_cannot_be_split_unevenly_is_left(vocabulary: int) -> None:
    graph = rounded(vocabulary)
    assert graph.rounded == {}
    assert vocabulary in lengths(graph)
