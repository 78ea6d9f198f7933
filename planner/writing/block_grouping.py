"""The grouping of a model's blocks in an existing plan: blocks with different entries are in different parts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from planner.errors import PlanMismatchError
from planner.graph.trace_module import ModuleNames
from planner.plan.patterns import resolve_keys
from planner.plan.ports import resolve_input_ports, resolve_output_ports
from planner.plan.reshard import reshard_modes
from planner.plan.sharding_plan import ShardingPlan
from planner.regions.block_grouping import Grouping, group_blocks
from planner.regions.blocks import Blocks
from planner.regions.regions import block_of

_MOST_STARTS = 4
"""Most places at which successive blocks may differ, for coarser groupings to be tried.

Plans that shardplan writes have no more of them, and each grouping takes time to try.
"""


def plan_groupings(plan: ShardingPlan, blocks: Blocks, names: ModuleNames) -> list[Grouping]:
    """Return the groupings of the blocks that ``plan`` may have been written from, the finest last.

    A part of the finest grouping is a row of successive blocks with equal entries in the plan. So it never joins blocks
    that differ. It may separate blocks that could share decisions: the first block of a list may have ports that the
    other blocks do not need.

    Raises:
        PlanMismatchError: the plan checkpoints a module that is no block, which cannot be priced.
        PlanKeyError: a key matches nothing, or two keys disagree.
    """
    modes = resolve_keys(plan.activation_checkpointing, names.modules, field="activation_checkpointing", what="module")
    everyone = set(blocks.first(None))
    for module in modes:
        if module not in everyone:
            raise PlanMismatchError(
                f"the plan checkpoints module {module!r}, which is none of the repeated blocks: that has no price.",
                subject="activation_checkpointing",
                expected=", ".join(blocks.lists) or "no block: this model repeats none",
                found=module,
                what_to_do="Checkpoint whole blocks, or run the plan unpriced.",
            )
    entries_by_block = _entries_by_block(plan, everyone, names)
    parts: dict[str, int] = {}
    starts: set[int] = set()
    for block_names in blocks.lists.values():
        number = 0
        for index, block in enumerate(block_names):
            before = block_names[index - 1] if index else block
            if (modes.get(block), entries_by_block[block]) != (modes.get(before), entries_by_block[before]):
                starts.add(index)
                number += 1
            parts[block] = number
    apart = sorted(starts) if len(starts) <= _MOST_STARTS else ()
    coarser = [group_blocks(blocks, modes, count) for count in (None, *apart)]
    told_apart = tuple(parts.items()) if len(set(parts.values())) > 1 else ()
    finest = Grouping(modes=tuple(modes.items()), parts=told_apart)
    return [*(grouping for grouping in dict.fromkeys(coarser) if grouping != finest), finest]


def _entries_by_block(
    plan: ShardingPlan, blocks: AbstractSet[str], names: ModuleNames
) -> dict[str, set[tuple[str, str, str]]]:
    """Return block -> its entries in a plan: (field, name relative to the block, text of the value)."""
    entries_by_block: dict[str, set[tuple[str, str, str]]] = {block: set() for block in blocks}
    stored = {key: value for key, value in plan.plan.items() if not isinstance(value, str)}
    groups = resolve_keys(plan.fully_shard, names.modules, field="fully_shard", what="module")
    fields: tuple[tuple[str, Mapping[str, object]], ...] = (
        ("plan", resolve_keys(stored, names.parameters, field="plan", what="parameter")),
        ("compute_plan", resolve_keys(plan.compute_plan, names.parameters, field="compute_plan", what="parameter")),
        ("gradient_plan", resolve_keys(plan.gradient_plan, names.parameters, field="gradient_plan", what="parameter")),
        ("fully_shard", groups),
        ("keep_gathered", reshard_modes(plan, names.modules, groups)),
        ("input_plan", resolve_input_ports(plan.input_plan, names.modules)),
        ("output_plan", resolve_output_ports(plan.output_plan, names.modules)),
    )
    for field, entries in fields:
        for name, value in entries.items():
            block = block_of(name)
            if block is not None and block in blocks:
                entries_by_block[block].add((field, name[len(block) :], repr(value)))
    return entries_by_block
