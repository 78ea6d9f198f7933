"""Entries of regions: the first op that reads each, the first op that saves it, and the entries that are passed on."""

from __future__ import annotations

from collections.abc import Mapping

from planner.liveness.op_order import NEVER, OpOrder


def first_reads(order: OpOrder) -> dict[tuple[int, int], int]:
    """Return entry (region, slot) -> position of the first op of the region that reads it.

    If no op of the region reads it, this is the first op of the graph that reads the value; views do not count.
    """
    by_root: dict[str, int] = {}
    for position in range(len(order.ops)):
        if not order.is_view(position):
            for name in order.reads(position):
                by_root.setdefault(name, position)
    positions = {}
    for region in order.regions.regions:
        for slot, region_slot in enumerate(region.slots):
            if region_slot.origin == "entry":
                readers = [order.position[r.op.name] for r in region.ops if slot in r.inputs]
                elsewhere = by_root.get(order.root(region_slot.value.name), NEVER)
                positions[region.index, slot] = min(readers, default=elsewhere)
    return positions


def passed_through(order: OpOrder) -> dict[tuple[int, int], int]:
    """Return (region, slot) -> the entry of the region that a slot passes on.

    The slot is the entry itself, or a view of the entry that no region outside of the checkpointed block reads.
    """
    entries = {
        (region.index, slot): slot
        for region in order.regions.regions
        for slot, region_slot in enumerate(region.slots)
        if region_slot.origin == "entry"
    }
    views: dict[tuple[int, int], int] = {}
    crossing: set[tuple[int, int]] = set()
    for link in order.regions.links:
        place = link.producer, link.producer_slot
        region = order.regions.regions[link.producer]
        root = order.root(region.slots[link.producer_slot].value.name)
        if order.block(link.producer) != order.block(link.consumer):
            crossing.add(place)
        elif place not in entries and place not in views:
            behind = (i for i, region_slot in enumerate(region.slots) if order.root(region_slot.value.name) == root)
            entry = next((i for i in behind if region.slots[i].origin == "entry"), None)
            if entry is not None:
                views[place] = entry
    return entries | {place: entry for place, entry in views.items() if place not in crossing}


def savers(order: OpOrder, passthroughs: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """Return entry (region, slot) -> position of the first op that saves its tensor for backward; `NEVER`: none does.

    The op is in the region, or in a region that the entry is passed on to.
    """
    first_savers: dict[tuple[int, int], int] = {}
    for region in order.regions.regions:
        for position, slot in enumerate(region.slots):
            if slot.origin == "entry":
                root = order.root(slot.value.name)
                first_savers[region.index, position] = min(
                    (order.position[r.op.name] for r in region.ops if root in order.profile.ops[r.op.name].saved),
                    default=NEVER,
                )
    steps = []
    for link in order.regions.links:
        entry = passthroughs.get((link.producer, link.producer_slot))
        if entry is not None:
            steps.append(((link.producer, entry), (link.consumer, link.consumer_slot)))
    steps.reverse()  # from the last region back: a value that many regions pass on then needs few rounds
    changed = True
    while changed:
        changed = False
        for source, target in steps:
            if first_savers[target] < first_savers[source]:
                first_savers[source] = first_savers[target]
                changed = True
    return first_savers
