"""The structure of a model at one batch, taken from that at another, is what building it gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from support.families import make
from torch import nn

from planner.liveness.structure import Structure, build_structure
from planner.session import PlanningSession


def contents(structure: Structure) -> dict[str, Any]:
    """Every field but the regions and the profile, which are of the batch; arrays as lists."""
    found: dict[str, Any] = {
        field.name: getattr(structure, field.name)
        for field in dataclasses.fields(structure)
        if field.name not in ("regions", "profile", "timeline")
    }
    timeline = {field.name: getattr(structure.timeline, field.name) for field in dataclasses.fields(structure.timeline)}
    classes = timeline.pop("classes")
    arrays = [
        {field.name: np.asarray(getattr(of_class, field.name)).tolist() for field in dataclasses.fields(of_class)}
        for of_class in classes
    ]
    return found | timeline | {"classes": arrays}


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_at_another_batch(family: str) -> None:
    module, inputs = make(family, 16)
    session = PlanningSession(module, example_inputs=inputs, cluster="1x4xtoy", dtype="fp32")
    traced = session._analysis
    taken = 0
    for ac in ("none", "selective", "full"):
        grouping = traced.grouping(ac)
        first = traced.structure(16, grouping)
        for batch in (8, 2, 1):
            there = traced.structure(batch, grouping)
            taken += there.timeline is first.timeline
            regions, blocks = traced.regions_at(batch)
            afresh = build_structure(regions, traced.profile(batch), blocks, dict(grouping.modes))
            assert contents(there) == contents(afresh)
            assert there.regions is regions
    assert taken >= 3  # not all: with a batch of 1, views keep other tensors


class _Gated(nn.Module):
    """Its first two layers are of one class: names that differ in digits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.w1, self.w3 = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(8, 16)
        self.w2 = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.norm(x)
        return self.w2(self.w1(read) * self.w3(read)).sum()


def test_of_a_class_those_members_are_counted_that_join() -> None:
    session = PlanningSession(
        _Gated(), example_inputs=(torch.zeros(16, 8),), cluster="1x2xtoy", dtype="fp32", fused_ops=True
    )
    structure = session._analysis.structure(16)
    assert {len(members.members) for members in structure.regions.classes} == {1, 2}
    assert sum(sum(op.values()) for ops in structure.gemm_sums for op in ops) == 1
    assert sum(sum(op.values()) for ops in structure.autograd_sums for op in ops) == 0


class _LooksAtATable(nn.Module):
    """Reads a child's weight for its shape alone, before the child is called (CLIPSeg's positions)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(self.table.weight.unsqueeze(0).shape[1])
        return self.out(x + self.table(positions))


def test_the_gradient_of_a_copy_is_priced_though_its_first_use_has_none() -> None:
    session = PlanningSession(
        _LooksAtATable(), example_inputs=(torch.zeros(8, 16, 8),), cluster="1x4xtoy", dtype="fp32", mesh="dp=2,tp=2"
    )
    traced = session._analysis
    structure = traced.structure(8, traced.grouping("none"))
    names = structure.regions.graph.parameters
    (table,) = (each for each in structure.parameters if names[each.values[0]] == ("table.weight",))
    priced = {structure.representative(index).ops[0].op.target_name: count for (index, _), count in table.uses.items()}
    assert priced == {"aten.unsqueeze.default": 0, "aten.embedding.default": 1}
