"""Regions of an MLP by hand, and classes of equal blocks."""

from __future__ import annotations

from typing import Any

import torch
from support import families
from torch import nn

from planner.graph.capture import to_meta
from planner.graph.example_inputs import meta_inputs
from planner.graph.from_fx import trace
from planner.regions.blocks import find_blocks
from planner.regions.module_bodies import OUTSIDE
from planner.regions.regions import RegionGraph, Slot, block_of, build_regions


def regions_of(module: nn.Module, inputs: Any) -> RegionGraph:
    return build_regions(trace(to_meta(module, None), meta_inputs(inputs)))


def parameter_slots(graph: RegionGraph) -> list[Slot]:
    return [slot for region in graph.regions for slot in region.slots if slot.origin == "parameter"]


def test_an_mlp_by_hand() -> None:
    module, kwargs = families.make("mlp", 4)
    graph = regions_of(module, kwargs)
    described = [
        (r.fqn if r.call != OUTSIDE else "(caller)", [ro.op.target_name.split(".")[1] for ro in r.ops])
        for r in graph.regions
    ]
    assert described == [
        ("fc1", ["linear"]),
        ("relu", ["relu"]),
        ("fc2", ["linear"]),
        ("head", ["linear"]),
        ("", ["cross_entropy_loss"]),
        ("(caller)", []),
        ("", []),
    ]
    origins = [[slot.origin for slot in r.slots] for r in graph.regions]
    assert origins[0] == ["entry", "parameter", "parameter", "op"]
    assert origins[1] == ["entry", "op"]
    assert origins[4] == ["entry", "entry", "op"]
    links = [(link.producer, link.producer_slot, link.consumer, link.consumer_slot) for link in graph.links]
    assert sorted(links) == [(0, 3, 1, 0), (1, 1, 2, 0), (2, 3, 3, 0), (3, 3, 4, 0), (4, 2, 5, 0), (6, 0, 0, 0)]
    assert [slot.parameter for slot in parameter_slots(graph)] == [
        f"{m}.{p}" for m in ("fc1", "fc2", "head") for p in ("weight", "bias")
    ]
    assert all(len(c.members) == 1 for c in graph.classes)


class Stack(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.ReLU(), nn.Linear(w, 8)) for w in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_equal_blocks_share_classes_and_others_do_not() -> None:
    equal = regions_of(Stack(16, 16, 16), (torch.zeros(4, 8),))
    assert {c.pattern: len(c.members) for c in equal.classes if c.pattern.endswith(".2")} == {}
    # The first block's input needs no gradient, so that its first linear is in a class of its own.
    assert sorted(len(c.members) for c in equal.classes if c.pattern == "layers.*.*") == [1, 2, 3, 3]
    unequal = regions_of(Stack(16, 24), (torch.zeros(4, 8),))
    assert all(len(c.members) == 1 for c in unequal.classes if c.pattern == "layers.*.*")
    blocks = find_blocks(equal)
    assert tuple(blocks.lists) == ("layers.*",)
    assert set(blocks.of_region.values()) == {"layers.0", "layers.1", "layers.2"}
    assert len(blocks.representatives) == 2
    assert find_blocks(regions_of(Stack(16), (torch.zeros(4, 8),))).lists == {}


def test_every_region_is_in_one_class_of_equal_regions() -> None:
    module, kwargs = families.make("llama", 4)
    graph = regions_of(module, kwargs)
    assert sorted(m for c in graph.classes for m in c.members) == list(range(len(graph.regions)))
    for index, regions in enumerate(graph.classes):
        assert all(graph.class_of[m] == index for m in regions.members)
        assert len({graph.regions[m].signature for m in regions.members}) == 1
    used = {slot.value.name for slot in parameter_slots(graph)}
    assert used == set(graph.graph.parameters)
    mlp = next(c for c in graph.classes if c.pattern == "model.layers.*.mlp.down_proj")
    assert [graph.regions[m].fqn for m in mlp.members] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]


def test_names_of_blocks() -> None:
    assert block_of("model.layers.3.mlp") == "model.layers.3"
    assert block_of("encoder.block.0.layer.1.x") == "encoder.block.0"
    assert block_of("3") == "3"
    assert block_of("fc1") is None
    assert block_of("") is None
