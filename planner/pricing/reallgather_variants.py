"""Strategies with re-all-gather: the backward all-gathers a linear layer's input again, instead of saving the copy.

A linear layer saves its input for the gradient of its weight. If tensor parallelism on n ranks has all-gathered that
input, the copy is n times as large as the local shard. Megatron's sequence parallelism saves the shard and all-gathers
it again in the backward (Korthikanti et al., arXiv 2205.05198, section 4.2.2). Linear layers that read the same copy
share the second all-gather as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch.distributed.tensor import Replicate

from cost_model.layouts.layout import Layout
from planner.liveness.structure import Structure
from planner.profile.op_profile import GraphProfile
from planner.regions.module_bodies import OUTSIDE
from planner.regions.regions import Region, RegionOp
from planner.strategies.enumerate import Strategy


def is_linear(region: Region, region_op: RegionOp, profile: GraphProfile) -> bool:
    """Return whether an op is a GEMM of exactly one activation with parameters."""
    slots = [region.slots[i] for i in region_op.inputs]
    is_gemm = profile.ops[region_op.op.name].flops > 0 and len(slots) > 1
    return is_gemm and sum(slot.origin != "parameter" for slot in slots) == 1


def with_reallgather_variants(
    structure: Structure, region: Region, strategies: Sequence[Strategy]
) -> tuple[Strategy, ...]:
    """Return ``strategies``, each followed by its variant with re-all-gather if it has one."""
    slots = tuple(_reallgather_slots(structure, region))
    return tuple(variant for strategy in strategies for variant in _variants(strategy, slots))


def _variants(strategy: Strategy, slots: Sequence[int]) -> Iterator[Strategy]:
    yield strategy
    reallgathered = tuple(slot for slot in slots if _may_be_gathered(strategy.forward[slot]))
    if reallgathered:
        yield dataclasses.replace(strategy, reallgathered=reallgathered)


def _may_be_gathered(layout: Layout | None) -> bool:
    return layout is not None and any(isinstance(placement, Replicate) for placement in layout)


def _reallgather_slots(structure: Structure, region: Region) -> Iterator[int]:
    """Yield the slots of module inputs that a single op of the region saves for backward, if that is a linear layer.

    Yield nothing in a checkpointed block, which saves no inputs of its linear layers.
    """
    if region.call == OUTSIDE or structure.mode(region) is not None:
        return
    profile = structure.profile
    for index, slot in enumerate(region.slots):
        if slot.origin != "entry" or slot.source is None or not slot.value.requires_grad:
            continue
        boundary = slot.boundary
        if boundary is None or boundary.direction != "input" or boundary.call != region.call:
            continue
        root = profile.root[slot.value.name]
        savers = [region_op for region_op in region.ops if root in profile.ops[region_op.op.name].saved]
        if len(savers) == 1 and is_linear(region, savers[0], profile):
            yield index
