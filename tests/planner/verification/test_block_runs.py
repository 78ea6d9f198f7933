"""Runs of equal blocks: found by structure and by the patterns of a plan."""

from __future__ import annotations

import pytest
from torch import nn

from planner.plan.sharding_plan import PlanMesh, ShardingPlan
from planner.verification.block_runs import BlockRun, block_lists, find_block_runs, position_offsets, repeated_groups


class Block(nn.Module):
    def __init__(self, layer_idx: int, width: int = 8) -> None:
        super().__init__()
        self.layer_idx, self.out = layer_idx, nn.Linear(8, width)


class Model(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(index, width) for index, width in enumerate(widths))


def plan(**fields: object) -> ShardingPlan:
    return ShardingPlan(mesh=PlanMesh.parse("dp=2"), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("signatures", "runs"),
    [
        ("aaaa", []),
        ("aaaaa", [(0, 1, 5)]),
        ("baaaaaac", [(1, 1, 6)]),
        ("aaaaabbbbbb", [(0, 1, 5), (5, 1, 6)]),
        ("abababababa", [(0, 2, 5)]),
        ("aabaabaabaabaab", [(0, 3, 5)]),
        ("abcdefgh", []),
    ],
)
def test_repeated_groups(signatures: str, runs: list[tuple[int, int, int]]) -> None:
    assert list(repeated_groups(signatures)) == runs


def test_blocks_of_two_kinds_are_two_runs() -> None:
    model = Model(*[8] * 6, *[16] * 7)
    assert find_block_runs(model, plan()) == (
        BlockRun(fqn="layers", first=0, period=1, groups=6),
        BlockRun(fqn="layers", first=6, period=1, groups=7),
    )


@pytest.mark.parametrize(
    ("key", "first_and_groups"),
    [
        ("layers.*.out.weight", [(0, 12)]),
        ("layers.{0-5}.out.weight", [(0, 6), (6, 6)]),
        ("layers.0.out.weight", [(1, 11)]),
        ("layers.7.out.weight", [(0, 7)]),
    ],
)
def test_a_pattern_that_names_some_blocks_splits_a_run(key: str, first_and_groups: list[tuple[int, int]]) -> None:
    model = Model(*[8] * 12)
    for fields in ({"plan": {key: ()}}, {"return_local_tensor": (key.removesuffix(".weight"),)}):
        runs = find_block_runs(model, plan(**fields))
        assert [(run.first, run.groups) for run in runs] == first_and_groups


def test_a_setting_that_differs_makes_another_kind_and_a_position_does_not() -> None:
    model = Model(*[8] * 12)
    assert position_offsets(list(model.layers)) == {("", "layer_idx"): 0}
    for block in list(model.layers)[6:]:
        block.window = 4
    assert [run.groups for run in find_block_runs(model, plan())] == [6, 6]


def test_only_outermost_lists_are_lists_of_blocks() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(Block(0) for _ in range(8))}) for _ in "ab")
    assert not block_lists(model)
    outer = nn.Sequential(nn.Linear(8, 8), Model(*[8] * 5))
    assert list(block_lists(outer)) == ["1.layers"]


def test_a_list_with_one_module_many_times_is_left_out() -> None:
    shared = Block(0)
    model = nn.Module()
    model.layers = nn.ModuleList([shared] * 6)
    assert not block_lists(model)
