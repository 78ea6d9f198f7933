"""Graphs cut into pipeline stages: nothing is lost, nothing is done twice but what depends on no parameter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import families
from support.small_models import TINY_LLAMA
from torch import nn

from api.requests.model_registry import load_model, quiet_libraries
from planner.graph.op_graph import OpGraph
from planner.profile.profile import profile_graph
from planner.run.model_analysis import ModelAnalysis
from planner.search.pipeline.split_graph import obstacle, split
from planner.session import PlanningSession


def llama(layers: int = 4, **changes: Any) -> ModelAnalysis:
    with quiet_libraries():
        source = load_model({"hf_config": {**TINY_LLAMA, "num_hidden_layers": layers, **changes}}, seq=32)
    session = PlanningSession(source.module, cluster="1x4xtoy", batch=8, seq=32, dtype="fp32", micro_batches=1)
    return session._analysis


def flops(graph: OpGraph) -> float:
    ops = profile_graph(graph, flash_attention=False).ops.values()
    return sum(op.flops + op.backward_flops for op in ops)


@pytest.fixture(scope="module")
def traced() -> ModelAnalysis:
    return llama()


@pytest.mark.parametrize("counts", [(2, 2), (1, 1, 1, 1), (1, 2, 1), (0, 2, 2, 0), (1, 3, 0)])
def test_stages_are_the_whole_model(traced: ModelAnalysis, counts: tuple[int, ...]) -> None:
    whole = traced.graph
    stages = [split(whole, traced.blocks, counts, stage) for stage in range(len(counts))]
    # Every op runs, those of parameters once.
    names = [op.name for stage in stages for op in stage.ops]
    assert set(names) == {op.name for op in whole.ops}
    plain = {op.name for op in whole.ops if whole.values[op.outputs[0]].kind == "plain"}
    assert len([name for name in names if name not in plain]) == len(set(names) - plain)
    parameters = [name for stage in stages for name in stage.parameters]
    assert sorted(parameters) == sorted(whole.parameters)
    assert sum(flops(stage) for stage in stages) == pytest.approx(flops(whole))
    # What a stage hands on is what the next is called with.
    for stage, after in itertools.pairwise(stages):
        sent = [output.value for output in stage.outputs if output.is_sent]
        assert sent
        assert sent == [given.value for given in after.inputs if given.path.startswith("pipeline.")]
    assert [output.is_loss for output in stages[-1].outputs if output.is_loss] == [True]
    assert not any(output.is_loss for stage in stages[:-1] for output in stage.outputs)


@pytest.mark.parametrize("counts", [(1,) * 6, (0, *(1,) * 6, 0)])
def test_a_rank_has_the_stages_that_it_is_given(counts: tuple[int, ...]) -> None:
    """Chunks of an interleaved pipeline, in one graph: all that each computes, receives and sends."""
    traced = llama(layers=6)
    whole, chunks = traced.graph, tuple(tuple(range(rank, len(counts), 2)) for rank in (0, 1))
    for which in chunks:
        rank = split(whole, traced.blocks, counts, *which)
        alone = [split(whole, traced.blocks, counts, stage) for stage in which]
        assert {op.name for op in rank.ops} == {op.name for stage in alone for op in stage.ops}
        assert set(rank.parameters) == {name for stage in alone for name in stage.parameters}
        for sides in ("inputs", "outputs"):
            found = [(side.path, side.value) for side in getattr(rank, sides) if side.path.startswith("pipeline.")]
            assert found == [
                (side.path, side.value)
                for stage in alone
                for side in getattr(stage, sides)
                if side.path.startswith("pipeline.")
            ]
    ranks = [split(whole, traced.blocks, counts, *which) for which in chunks]
    assert sum(flops(rank) for rank in ranks) == pytest.approx(flops(whole))


def test_a_stage_reads_the_inputs_that_it_needs(traced: ModelAnalysis) -> None:
    first, last = (split(traced.graph, traced.blocks, (2, 2), stage) for stage in (0, 1))
    assert [given.path for given in first.inputs] == ["input_ids"]
    assert [given.path for given in last.inputs] == ["labels", "pipeline.0"]


def test_tied_ends_are_not_cut() -> None:
    traced = llama(tie_word_embeddings=True)
    assert "both ends" in (obstacle(traced.graph, traced.blocks) or "")


@pytest.mark.parametrize(("family", "why"), [("t5", "2 lists"), ("mlp", "no lists")])
def test_what_is_no_single_list_of_blocks_is_not_cut(family: str, why: str) -> None:
    module, inputs = families.make(family, 8)
    session = PlanningSession(module, cluster="1x2xtoy", example_inputs=inputs, dtype="fp32", micro_batches=1)
    assert why in (obstacle(session._analysis.graph, session._analysis.blocks) or "")


class Residual(nn.Linear):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if scale is None else x * scale).relu() + x


class Reaching(nn.Module):
    """Blocks, one after the other, some parts of which reach further than to the next."""

    def __init__(self, reach: str, blocks: int = 6) -> None:
        super().__init__()
        self.reach = reach
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(Residual(8, 8) for _ in range(blocks))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids) * self.scale
        seen = []
        for number, layer in enumerate(self.layers):
            x = layer(x, self.scale) if self.reach == "parameter" and number == 0 else layer(x)
            seen.append(x)
        last = seen[-2] if self.reach == "head" else 0
        logits = self.head(x + last)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())}


@pytest.mark.parametrize("reach", ["head", "parameter"])
def test_what_reaches_over_an_end_is_not_cut_into_ends_alone(reach: str) -> None:
    options: dict[str, Any] = {"dtype": "fp32", "micro_batches": 8, "executable_only": False, "ac": "none"}
    inputs = {"ids": torch.zeros(8, 4, dtype=torch.long)}
    session = PlanningSession(Reaching(reach), cluster="4x1xtoy", example_inputs=inputs, **options)
    graph, blocks = session._analysis.graph, session._analysis.blocks
    assert obstacle(graph, blocks) is None
    assert obstacle(graph, blocks, ends_alone=True) is not None
    plan = session.plan(mesh="pp=4,dp=1")
    assert plan.pipeline is not None
    assert plan.pipeline.chunks == 1
    plain = PlanningSession(Reaching("nothing"), cluster="4x1xtoy", example_inputs=inputs, **options)
    assert obstacle(plain._analysis.graph, plain._analysis.blocks, ends_alone=True) is None
    plan = plain.plan(mesh="pp=4,dp=1")
    assert plan.pipeline is not None
    assert plan.pipeline.chunks == 2
