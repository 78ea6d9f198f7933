"""Rules and collectives of ops that update buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from planner.graph.capture import ExampleInputs, to_meta
from planner.graph.from_fx import trace
from planner.graph.op_graph import Op, OpGraph, Value, writes_plain, written_input
from planner.graph.trace_module import trace_module
from planner.regions.regions import Region, build_regions
from planner.strategies.axis_rule import InnerCollective
from planner.strategies.axis_strategies import AxisStrategy
from planner.strategies.buffer_updates import BATCH_NORM, batch_norm_collectives, write_collectives
from planner.strategies.enumerate import StrategyTable
from planner.strategies.own_collectives import inner_collectives
from planner.wire.codec import read_graph, write_graph

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
AVERAGE = Partial("avg")


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).square().sum()


class Means(nn.Module):
    """One mean is written in place, another by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("last", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.weight
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        self.last = h.detach().mean(0)
        return h.square().sum()


def graph_of(module: nn.Module) -> OpGraph:
    inputs = ExampleInputs(args=(torch.empty(8, 16, device="meta"),), kwargs={})
    return trace(to_meta(module, None), inputs)


def region_with(graph: OpGraph, target: str) -> Region:
    regions = build_regions(graph).regions
    return next(region for region in regions if any(item.op.target_name == target for item in region.ops))


def strategies(region: Region) -> list[AxisStrategy]:
    return list(StrategyTable().on_axis(region, 2))


def value(shape: tuple[int, ...], kind: str = "activation", *, requires_grad: bool = True) -> Value:
    return Value(name="v", shape=shape, dtype=torch.float32, kind=kind, requires_grad=requires_grad)  # type: ignore[arg-type]


def test_the_written_tensor_is_the_first_of_in_place_ops_and_the_last_of_out_overloads() -> None:
    aten = torch.ops.aten
    assert written_input(aten.add_.Tensor, 2) == 0
    assert written_input(aten.div.out, 3) == 2
    assert written_input(aten.add.Tensor, 2) is None
    assert written_input(aten.native_batch_norm.default, 5) is None


def test_writes_to_buffers_are_ops_of_their_own_with_a_plain_result() -> None:
    graph = graph_of(Means())
    writes = [op for op in graph.ops if writes_plain(op, [graph.values[name] for name in op.inputs])]
    assert [op.target_name for op in writes] == ["aten.add_.Tensor", "aten.copy_.default"]
    assert {graph.values[name].kind for op in writes for name in op.outputs} == {"plain"}


def test_batch_norm_may_shard_its_batch_or_its_channels() -> None:
    region = region_with(graph_of(Norm()), BATCH_NORM)
    assert {strategy.forward[0] for strategy in strategies(region)} == {R, S0, S1}


def test_a_mean_of_a_sharded_batch_is_whole_where_it_is_written() -> None:
    region = region_with(graph_of(Means()), "aten.copy_.default")
    means = [i for i, slot in enumerate(region.slots) if "mean" in slot.value.name and slot.origin == "op"]
    found = [(strategy.forward[0], *(strategy.forward[i] for i in means)) for strategy in strategies(region)]
    assert (S0, R, R) in found
    assert (R, R, R) in found


def test_written_values_become_whole_on_the_last_axis_first() -> None:
    inputs = [value((8,), "plain"), value((32, 4))]
    found = write_collectives(inputs, [None, (S0, S1)], [(8,), (16, 1)], (2, 4))
    assert found == (
        InnerCollective(kind="all_gather", axis=1, nbytes=4 * 16 * 4),
        InnerCollective(kind="all_gather", axis=0, nbytes=4 * 32 * 4),
    )
    found = write_collectives(inputs, [None, (AVERAGE, R)], [(8,), (32, 4)], (2, 4))
    assert found == (InnerCollective(kind="all_reduce", axis=0, nbytes=4 * 32 * 4),)


def test_batch_norm_reduces_statistics_of_the_batch_and_gathers_those_of_channels() -> None:
    graph = graph_of(Norm())
    op = next(op for op in graph.ops if op.target_name == BATCH_NORM)
    inputs = [graph.values[name] for name in op.inputs]
    channels, batch = (R, S0), (R, R)
    layouts = [(S0, S1), channels, channels, None, None]
    assert inner_collectives(op, inputs, layouts, (2, 4)) == (
        InnerCollective(kind="all_gather", axis=0, nbytes=2 * 4 * 4 * 2),
        InnerCollective(kind="all_gather", axis=1, nbytes=2 * 16 * 4),
        InnerCollective(kind="all_reduce", axis=0, nbytes=2 * 4 * 4, phase="backward"),
    )
    assert inner_collectives(op, inputs, [(R, R), batch, batch, None, None], (2, 4)) == ()
    in_evaluation = Op(**{field: getattr(op, field) for field in Op.__slots__} | {"args": (*op.args[:5], False)})
    assert batch_norm_collectives(in_evaluation, inputs, layouts, (2, 4)) == ()


@pytest.mark.parametrize("module", [Norm, Means])
def test_a_graph_with_writes_can_be_sent(module: type[nn.Module]) -> None:
    traced = trace_module(module(), example_inputs=(torch.empty(8, 16),), dtype="fp32")
    assert read_graph(write_graph(traced)).graph.values == traced.graph.values
