"""Activations that were gathered for a linear layer, and are gathered again for its backward in place of being kept.

A linear layer keeps its input for the gradient of its weight. Where tensor parallelism gathered that input, the copy is
as many times the piece that it was gathered from as there are ranks; Megatron's sequence parallelism keeps the piece
(Korthikanti et al., arXiv 2205.05198, section 4.2.2). Linear layers that read the same copy share it backward as well.
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
    """Tell whether an op is a product of one activation and of parameters."""
    slots = [region.slots[i] for i in region_op.inputs]
    is_product = profile.ops[region_op.op.name].flops > 0 and len(slots) > 1
    return is_product and sum(slot.origin != "parameter" for slot in slots) == 1


def gathering_again(structure: Structure, region: Region, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Return ``strategies``, and behind each that may have its inputs gathered the one that gathers them again."""
    slots = tuple(_slots(structure, region))
    return tuple(found for strategy in strategies for found in _with_variant(strategy, slots))


def _with_variant(strategy: Strategy, slots: Sequence[int]) -> Iterator[Strategy]:
    yield strategy
    again = tuple(slot for slot in slots if _may_be_gathered(strategy.forward[slot]))
    if again:
        yield dataclasses.replace(strategy, again=again)


def _may_be_gathered(layout: Layout | None) -> bool:
    return layout is not None and any(isinstance(placement, Replicate) for placement in layout)


def _slots(structure: Structure, region: Region) -> Iterator[int]:
    """Yield the inputs that a region's module is called with, and that one linear layer in it alone keeps.

    A checkpointed block keeps none: it is run again.
    """
    if region.call == OUTSIDE or structure.mode(region) is not None:
        return
    profile = structure.profile
    for slot, seen in enumerate(region.slots):
        if seen.origin != "entry" or seen.source is None or not seen.value.requires_grad:
            continue
        boundary = seen.boundary
        if boundary is None or boundary.direction != "input" or boundary.call != region.call:
            continue
        root = profile.root[seen.value.name]
        keeping = [region_op for region_op in region.ops if root in profile.ops[region_op.op.name].saved]
        if len(keeping) == 1 and is_linear(region, keeping[0], profile):
            yield slot
