"""`BlockRun`: consecutive blocks of a module that are equal and that a plan treats alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from planner.graph.capture import has_default_deepcopy
from planner.plan.patterns import match_keys
from planner.plan.sharding_plan import ShardingPlan

LEAST_GROUPS = 5
"""Least number of equal groups in a run: fewer are not worth two runs of a shorter module."""

_LONGEST_PERIOD = 8
"""Most blocks in a group. Known models alternate kinds of layers with periods of 2 to 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Consecutive blocks of a list: ``groups`` times the same ``period`` blocks.

    Attributes:
        fqn: FQN of the list.
        first: position of the first block in the list.
        period: number of blocks in a group: 1 where all blocks are equal, more where kinds of blocks alternate.
        groups: number of groups.
    """

    fqn: str
    first: int
    period: int
    groups: int

    def positions(self, groups: int) -> range:
        """Return the positions in the list of the blocks of the first ``groups`` groups."""
        return range(self.first, self.first + self.period * groups)


def find_block_runs(module: nn.Module, plan: ShardingPlan) -> tuple[BlockRun, ...]:
    """Return the runs of at least `LEAST_GROUPS` equal groups of blocks, in the outermost lists of ``module``.

    Two blocks are equal if they have the same structure, apart from integers that count positions, and if every pattern
    of the plan that names something in one names it in the other.
    """
    keys = list(plan_keys(plan))
    runs: list[BlockRun] = []
    for fqn, blocks in block_lists(module).items():
        signatures = [
            (structure, named)
            for structure, named in zip(_structures(blocks), _keys_of_blocks(fqn, len(blocks), keys), strict=True)
        ]
        runs += (
            BlockRun(fqn=fqn, first=first, period=period, groups=groups)
            for first, period, groups in repeated_groups(signatures)
        )
    return tuple(runs)


def plan_keys(plan: ShardingPlan) -> Iterator[str]:
    """Yield every FQN pattern in ``plan``."""
    yield from (key for _, key in plan.patterns())
    if plan.zigzag is not None:
        yield from plan.zigzag.inputs
        yield from plan.zigzag.outputs


def block_lists(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Return FQN -> children of each outermost list (``ModuleList``, ``Sequential``) of `LEAST_GROUPS` modules or more.

    Lists that hold a module twice are left out. A list inside of a shorter ``ModuleList`` is not an outermost one: the
    experts of a model of two layers are not its blocks.
    """
    lists: dict[str, list[nn.Module]] = {}
    outer: list[str] = []
    for fqn, submodule in module.named_modules():
        if not isinstance(submodule, nn.ModuleList | nn.Sequential) or any(_is_inside(fqn, other) for other in outer):
            continue
        children = list(submodule.children())
        is_long = len(children) >= LEAST_GROUPS
        if is_long or isinstance(submodule, nn.ModuleList):
            outer.append(fqn)
        if is_long and len(children) == len(submodule) and has_default_deepcopy(type(submodule)):
            lists[fqn] = children
    return lists


def _is_inside(fqn: str, other: str) -> bool:
    return not other or fqn.startswith(f"{other}.")


def repeated_groups(signatures: Sequence[Hashable]) -> Iterator[tuple[int, int, int]]:
    """Yield (first position, period, groups) of the runs of at least `LEAST_GROUPS` equal groups, left to right.

    Of all periods with which a run starts at a position, the shortest counts.
    """
    position = 0
    while position < len(signatures):
        step = 1
        for period in range(1, _LONGEST_PERIOD + 1):
            groups = _groups_at(signatures, position, period)
            if groups >= LEAST_GROUPS:
                yield position, period, groups
                step = period * groups
                break
        position += step


def _groups_at(signatures: Sequence[Hashable], position: int, period: int) -> int:
    """Return how often the ``period`` signatures from ``position`` on occur one after the other."""
    end = position + period
    while end < len(signatures) and signatures[end] == signatures[end - period]:
        end += 1
    return (end - position) // period


def position_offsets(blocks: Sequence[nn.Module]) -> dict[tuple[str, str], int]:
    """Return (FQN in a block, attribute) -> offset, for integers that are a block's position plus that offset.

    An example is ``layer_idx`` of the attention modules of transformers.
    """
    values: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for position, block in enumerate(blocks):
        for fqn, submodule in block.named_modules():
            for name, value in vars(submodule).items():
                if type(value) is int:
                    values.setdefault((fqn, name), []).append((position, value))
    offsets = {}
    for place, pairs in values.items():
        differences = {value - position for position, value in pairs}
        if len(pairs) >= LEAST_GROUPS and len(differences) == 1:
            offsets[place] = differences.pop()
    return offsets


def _structures(blocks: Sequence[nn.Module]) -> list[Hashable]:
    """Return the structure of each block: classes, sizes and settings of its submodules, shapes, tied parameters."""
    positions = position_offsets(blocks)
    return [_structure(block, positions) for block in blocks]


def _structure(block: nn.Module, positions: dict[tuple[str, str], int]) -> Hashable:
    modules = []
    for fqn, submodule in block.named_modules(remove_duplicate=False):
        settings = tuple(
            (name, value)
            for name, value in sorted(vars(submodule).items())
            if type(value) in (bool, int, str, type(None)) and (fqn, name) not in positions
        )
        modules.append((fqn, type(submodule), submodule.extra_repr(), settings))
    first_name: dict[int, str] = {}
    tensors = []
    for named in (block.named_parameters(remove_duplicate=False), block.named_buffers(remove_duplicate=False)):
        for fqn, tensor in named:
            tied_to = first_name.setdefault(id(tensor), fqn)
            tensors.append((fqn, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tied_to))
    return tuple(modules), tuple(tensors)


def _keys_of_blocks(fqn: str, count: int, keys: Sequence[str]) -> list[frozenset[str]]:
    """Return for each of ``count`` blocks in the list ``fqn`` the heads of the plan's keys that match the block.

    The head of a key is the part of it that names a block.
    """
    prefix = f"{fqn}." if fqn else ""
    blocks = [f"{prefix}{position}" for position in range(count)]
    depth = blocks[0].count(".") + 1
    heads = {".".join(parts[:depth]) for key in keys if len(parts := key.split(".")) >= depth}
    named: dict[str, set[str]] = {block: set() for block in blocks}
    for head, matched in match_keys(heads, blocks).items():
        for block in matched:
            named[block].add(head)
    return [frozenset(named[block]) for block in blocks]
