"""What a linear can do on one axis is exactly the known set (data, column, row, sequence, replicated), and on two."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from planner.graph.capture import to_meta
from planner.graph.example_inputs import meta_inputs
from planner.graph.from_fx import trace
from planner.regions.regions import Region, build_regions
from planner.strategies import axis_strategies
from planner.strategies.axis_strategies import AxisStrategy
from planner.strategies.dtensor_rules import (
    DTensorRules,
    GlobalOutputs,
    UnsupportedTorchError,
    _free_or_not,
    check_torch_version,
    mesh_without_groups,
)
from planner.strategies.enumerate import StrategyTable

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)


class Body(nn.Module):
    """A linear between two others, so that its input has a gradient, on [batch, seq, hidden]."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.linear, self.last = nn.Linear(8, 8), nn.Linear(8, 16, bias=bias), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.linear(self.first(x))).sum()


def linear_region(*, bias: bool, batch: int = 4, seq: int = 6) -> Region:
    graph = build_regions(trace(to_meta(Body(bias), None), meta_inputs((torch.zeros(batch, seq, 8),))))
    return next(region for region in graph.regions if region.fqn == "linear")


def one_axis(*triples: tuple[tuple[object, ...], tuple[object, ...]]) -> set[AxisStrategy]:
    return {AxisStrategy(forward=f, gradient=g) for f, g in triples}  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "expected"), [(8, (S0, R, S0)), (3, (R, R, R))])
def test_an_axis_for_the_batch_splits_the_batch_alone(batch: int, expected: tuple[object, ...]) -> None:
    region, table = linear_region(bias=False, batch=batch), StrategyTable()
    everything = table.on_mesh(region, (2, 2, 2))
    found = table.on_mesh(region, (2, 2, 2), batch_axes=(0,))
    on_axis = {tuple(layout[0] for layout in strategy.forward if layout is not None) for strategy in found}
    assert on_axis == {expected}
    # The other two are free to do whatever they can beside it.
    assert set(found) == {
        s for s in everything if tuple(layout[0] for layout in s.forward if layout is not None) == expected
    }
    assert len({tuple(layout[1:] for layout in s.forward if layout is not None) for s in found}) > 10


KNOWN = one_axis(
    ((R, R, R), (R, R, R)),  # everyone computes everything
    ((R, R, R), (P, P, P)),  # as before, of a gradient that is still to be summed
    ((S0, R, S0), (S0, P, S0)),  # data parallel: FSDP is this with a weight that rests split
    ((S1, R, S1), (S1, P, S1)),  # sequence parallel
    ((R, S0, S2), (P, S0, S2)),  # column-wise: the input's gradient is partial
    ((S2, S1, P), (S2, S1, R)),  # row-wise: the output is partial
)


def test_a_linear_on_one_axis() -> None:
    found = StrategyTable().on_axis(linear_region(bias=False), 2)
    assert len(found) == len(set(found))
    assert set(found) == KNOWN


def test_a_bias_follows_its_weight() -> None:
    found = StrategyTable().on_axis(linear_region(bias=True), 2)
    by_weight = {(s.forward[1], s.forward[2]) for s in found}
    assert by_weight == {(R, R), (S0, S0), (S1, R)}
    assert all(s.gradient[2] == P for s in found if s.forward[0] in (S0, S1))


def test_only_even_splits() -> None:
    table = StrategyTable()
    on_three = {s.forward[0] for s in table.on_axis(linear_region(bias=False), 3)}
    assert on_three == {R, S1}  # of 4 x 6 x 8 only the 6 divides by 3; of the weight's 16 x 8 nothing does
    region = linear_region(bias=False)
    on_mesh = table.on_mesh(region, (4, 2))
    batch_twice = [s for s in on_mesh if s.forward[0] == (S0, S0)]
    assert not batch_twice  # 4 samples over 8 ranks


def test_a_mesh_is_the_product_of_its_axes() -> None:
    table, region = StrategyTable(), linear_region(bias=False, seq=8)
    axis, mesh = table.on_axis(region, 2), table.on_mesh(region, (2, 2))
    assert len(set(mesh)) == len(mesh) == len(axis) ** 2
    megatron_with_data = ((S0, R), (R, S0), (S0, S2))
    assert megatron_with_data in {s.forward for s in mesh}
    ones = table.on_mesh(region, (1, 2))
    assert len(ones) == len(axis)
    assert all(layout[0] == R for s in ones for layout in s.forward if layout is not None)
    assert all(table.runs(region, s, (1, 2)) for s in ones)
    assert any(table.runs(region, s, (2, 2)) for s in mesh if s.forward == megatron_with_data)


def test_torch_outside_the_supported_range_is_refused() -> None:
    check_torch_version("2.13.1+cpu")
    for version in ("2.12.0", "2.14.0"):
        with pytest.raises(UnsupportedTorchError, match="needs torch"):
            check_torch_version(version)


PLACEMENTS = (
    Replicate(),
    Shard(0),
    Shard(1),
    _StridedShard(0, split_factor=4),
    _StridedShard(1, split_factor=2),
    Partial(),
    Partial("avg"),
)


def _spec(layout: tuple[Any, ...]) -> DTensorSpec:
    mesh = mesh_without_groups((2,) * len(layout))
    meta = TensorMeta(torch.Size((16, 24)), (24, 1), torch.float32)
    return DTensorSpec(mesh, layout, tensor_meta=meta, use_strided_shard_as_shard_order=False)


@pytest.mark.parametrize(("axes", "pairs"), [(1, 49), (2, 400), (3, 40)])
def test_what_is_free_to_dtensor(axes: int, pairs: int) -> None:
    """DTensor chooses by cost, and only whether a cost is 0 decides what we take it to do."""
    layouts = list(itertools.product(PLACEMENTS, repeat=axes))
    chosen = random.Random(0).sample(list(itertools.product(layouts, layouts)), pairs)
    free = 0
    for before, after in chosen:
        current, target = _spec(before), _spec(after)
        expected = redistribute_cost(current, target) == 0
        free += expected
        assert (_free_or_not(current, target) == 0) == expected, (before, after)
    assert 0 < free < pairs


@pytest.mark.slow
def test_what_is_free_to_dtensor_on_two_axes_in_all_cases() -> None:
    layouts = list(itertools.product(PLACEMENTS, repeat=2))
    for before, after in itertools.product(layouts, layouts):
        current, target = _spec(before), _spec(after)
        assert (_free_or_not(current, target) == 0) == (redistribute_cost(current, target) == 0), (before, after)


def test_dtensor_answers_the_same_where_it_is_told_what_ops_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one axis, with what it was told on two, and where it works out everything again each time."""
    region = linear_region(bias=True)
    (region_op,) = region.ops
    inputs = tuple(region.slots[i].value for i in region_op.inputs)

    def answers(outputs: GlobalOutputs | None) -> list[Any]:
        found: list[Any] = []
        for shape, options in ((2, 2), [(S0, R), (R, S2), (S1, R)]), ((2,), [(R,), (S0,), (S1,), (S2,)]):
            rules = DTensorRules(shape, outputs)
            for first in options:
                for second in options:
                    layouts = (first, second, (R,) * len(shape))
                    made = rules.forward(region_op.op, inputs, layouts)
                    found.append(made)
                    if made is not None:
                        found.append(rules.backward(region_op.op, inputs, layouts, made))
        return found

    told = answers(GlobalOutputs())
    assert any(answer is not None for answer in told)
    monkeypatch.setattr(GlobalOutputs, "of", lambda self, *args: self._compute(*args))
    assert told == answers(None)


class ManyInputs(nn.Module):
    """Stacks the results of 12 layers, which come from outside of the region that stacks them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers], dim=1).sum()


def test_an_op_of_many_tensors_is_tried_with_equal_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build_regions(trace(to_meta(ManyInputs(), None), meta_inputs((torch.zeros(4, 6, 8),))))
    region = next(r for r in graph.regions if any(o.op.target_name == "aten.stack.default" for o in r.ops))
    asked = []
    forward = DTensorRules.forward
    monkeypatch.setattr(DTensorRules, "forward", lambda *args: asked.append(1) or forward(*args))
    found = StrategyTable().on_axis(region, 2)
    assert len(asked) < 200  # of 4**12 placements
    stacked = [tuple(strategy.forward[i] for i in region.ops[0].inputs) for strategy in found]
    assert {(S0,) * 12, (R,) * 12} <= set(stacked)


class OverTime(nn.Module):
    """A loop of many ops over inputs that may each be split by samples or not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, gate, add = self.a(x), self.b(x), self.c(x)
        for _ in range(300):
            state = torch.sigmoid(state * gate + add)
        return state.square().mean()


def test_a_region_of_many_ops_leaves_no_input_replicated_that_it_can_split() -> None:
    graph = build_regions(trace(to_meta(OverTime(), None), meta_inputs((torch.zeros(4, 6, 8),))))
    region = max(graph.regions, key=lambda region: len(region.ops))
    entries = [i for i, slot in enumerate(region.slots) if slot.origin == "entry"]
    found = [tuple(s.forward[i] for i in entries) for s in StrategyTable().on_axis(region, 2)]
    assert {(S0,) * 3, (R,) * 3} <= set(found)
    assert not any(R in placed and S0 in placed for placed in found)


def test_where_there_are_too_many_strategies_the_replicated_and_the_data_parallel_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(axis_strategies, "_MOST_STEPS", 2)
    found = set(StrategyTable().on_axis(linear_region(bias=False), 2))
    assert found < KNOWN
    assert {((R, R, R), (R, R, R)), ((S0, R, S0), (S0, P, S0))} <= {(each.forward, each.gradient) for each in found}


class Towers(nn.Module):
    """Equal towers on one input, in one region: each can be split in its own way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.unbind(0)
        return torch.stack([row.relu().sum(-1) for row in rows]).sum()


def test_a_region_of_equal_parts_is_combined_on_a_mesh_as_long_as_its_strategies_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = build_regions(trace(to_meta(Towers(), None), meta_inputs((torch.zeros(3, 8, 8),))))
    region = max(graph.regions, key=lambda region: len(region.ops))
    everything = StrategyTable().on_mesh(region, (2, 2))
    most = len(everything) // 2
    monkeypatch.setattr("planner.strategies.enumerate._MOST_COMBINED_OPS", most * len(region.ops))
    found = StrategyTable().on_mesh(region, (2, 2))
    assert set(found) < set(everything)
    assert len(found) <= most
    assert any(all(layout in (None, (R, R)) for layout in strategy.forward) for strategy in found)
    assert any((S1, S1) in strategy.forward for strategy in found)


def test_the_replicated_strategy_stays_where_another_has_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build_regions(trace(to_meta(Towers(), None), meta_inputs((torch.zeros(3, 8, 8),))))
    region = max(graph.regions, key=lambda region: len(region.ops))
    monkeypatch.setattr("planner.strategies.enumerate._MOST_PRICED_OPS", 0)
    table = StrategyTable()
    assert table.runs_replicated(region)
    assert any(S1 in strategy.forward for strategy in table.on_axis(region, 2))
