"""Boundary values of regions: their first reader, who saves them, and which are sent to other regions."""

from __future__ import annotations

from collections.abc import Mapping

from planner.liveness.op_order import NEVER, OpOrder


def first_reads(order: OpOrder) -> dict[tuple[int, int], int]:
    """Return for every entry (region, slot) the position of the first op that reads it.

    Where its region hands it on unread, that is the first op anywhere that reads its value, views left out.
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
    """Return (region, slot) -> entry of the region that the slot is, or is a view of that no other block reads."""
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
    """Return for every entry (region, slot) the first op that keeps its tensor: there, or further down."""
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
    steps.reverse()  # a value that many regions pass on settles from the end
    changed = True
    while changed:
        changed = False
        for source, target in steps:
            if first_savers[target] < first_savers[source]:
                first_savers[source] = first_savers[target]
                changed = True
    return first_savers
