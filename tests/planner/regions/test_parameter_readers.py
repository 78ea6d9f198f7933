"""Who reads a parameter: its own module, one around it, or one that passes it on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.any_modules import SelfAttention
from support.shared_parameters import ReadsASibling, ReadsItsChild, UsesTwice
from torch import nn

from planner.graph.capture import to_meta
from planner.graph.example_inputs import meta_inputs
from planner.graph.from_fx import trace
from planner.graph.op_graph import with_results
from planner.liveness.parameter_classes import _reader_calls
from planner.regions.parameter_readers import ParameterReaders, find_parameter_readers
from planner.regions.regions import build_regions


def readers_of(module: nn.Module, *shape: int) -> ParameterReaders:
    return find_parameter_readers(trace(to_meta(module, None), meta_inputs((torch.zeros(8, *shape),))))


class Deep(nn.Module):
    """Its blocks read a weight two levels down."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.part[0].weight)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(self.Block(), self.Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def test_a_parameter_that_its_own_module_reads_has_no_other_reader() -> None:
    assert readers_of(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), 16).levels == {}
    assert readers_of(UsesTwice(), 16).levels == {}


def test_levels_above_the_module_that_has_it() -> None:
    assert readers_of(ReadsItsChild(), 16).levels == {"inner.weight": 1, "inner.bias": 1}
    assert readers_of(SelfAttention(), 4, 16).levels == {
        "attention.out_proj.weight": 1,
        "attention.out_proj.bias": 1,
    }
    assert readers_of(Deep(), 16).levels == {"blocks.0.part.0.weight": 2, "blocks.1.part.0.weight": 2}


def test_who_passes_a_parameter_on_reads_it_and_one_copy_serves_both_uses() -> None:
    module = ReadsASibling()
    graph = with_results(trace(to_meta(module, None), meta_inputs((torch.zeros(8, 16),))), training=True)
    assert find_parameter_readers(graph).levels == {"first.weight": 1}
    uses = _reader_calls(build_regions(graph))
    (value,) = (value for value, names in graph.parameters.items() if "first.weight" in names)
    by_use = uses[value]["first.weight"]
    assert len(by_use) == 2
    assert all(calls == {0} for calls in by_use.values())
