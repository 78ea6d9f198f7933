"""When memory may be at its peak: candidates of the backward pass.

A backward pass frees what autograd saved as it makes gradients, so that activations and gradients are never all there
at once. A *candidate* is the backward of one op. What is alive at it: what ops up to it keep; gradients of parameters
that are used only after it; gradients of activations on their way from later ops to earlier ones; and what the op
itself makes. In a checkpointed block "up to it" means within the block, since earlier blocks have not been made
again; and there are candidates more while it is made: when the last op that keeps anything has run, when the next has
read what that one made, and, where products are cached, in the first op that has some inside it.

Between the first and the last of equal blocks all of that changes linearly, so that a peak is at an end: each class of
regions has candidates at its first and its last two members, and there at the op at which most is alive. (Two, because
the first block has no other to gather parameters for ahead, and after the last no gradients are being reduced.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.ilp.quantities import Quantity, live
from planner.liveness.op_order import OpOrder
from planner.regions.regions import Region

ENDS = 2
"""Members of a class, from either end, that have candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakCandidate:
    """The backward of the op at ``position`` in the graph, in ``block`` where that is checkpointed.

    Attributes:
        recomputing: position of the op whose forward runs again at the candidate, just before that backward; None:
            none does.
        mid_recompute: whether the block has been made again only up to that op, which has not made its results yet.
    """

    key: str
    position: int
    block: str | None
    recomputing: int | None = None
    mid_recompute: bool = False

    @property
    def recomputed_until(self) -> int:
        """The position up to which the block has been made again."""
        return self.recomputing - 1 if self.mid_recompute and self.recomputing is not None else self.position

    def quantity(self, role: str) -> Quantity:
        """Return the quantity of bytes of ``role`` that are alive at this candidate."""
        return live(self.key, role)


UPDATE = PeakCandidate(key="update", position=-1, block=None)
"""The optimizer's step, as if it were the backward of an op before all others: every gradient is there, and no more."""


def find_peak_candidates(order: OpOrder) -> tuple[PeakCandidate, ...]:
    """Return the candidates at which memory may be at its peak: the update, then by position, then recomputations."""
    by_position = {UPDATE.position: UPDATE}
    for region_class in order.regions.classes:
        members = [order.regions.regions[m] for m in region_class.members]
        working = [m for m in members if any(order.has_backward(r.op) for r in m.ops)]
        ends = {m.index: m for m in (*working[:ENDS], *working[-ENDS:])}
        for region in ends.values():
            positions = [order.position[r.op.name] for r in region.ops if order.has_backward(r.op)]
            position = max(positions, key=lambda p: _alive_inside(order, region, p))
            by_position[position] = PeakCandidate(key=str(position), position=position, block=order.block(region.index))
    return (*(by_position[position] for position in sorted(by_position)), *_recomputations(order, by_position))


def _recomputations(order: OpOrder, by_position: Mapping[int, PeakCandidate]) -> Iterator[PeakCandidate]:
    """Yield the candidates while a block is run again: the first op of its backward that needs it asks for that."""
    for block in dict.fromkeys(candidate.block for candidate in by_position.values() if candidate.block is not None):
        savers = [p for p in order.ops_in_block[block] if order.saves(order.ops[p])]
        if not savers:
            continue
        last = max(savers)
        last_outputs = {order.root(name) for name in order.ops[last].outputs}
        reading = (
            p for p in order.ops_in_block[block] if p > last and last_outputs & order.reads(p) and not order.is_view(p)
        )
        for again in (last, *itertools.islice(reading, 1)):
            yield PeakCandidate(key=f"{again}-again", position=last, block=block, recomputing=again)
        # With what is cached for the ops after it, most is there when the first op with products inside runs.
        inner = (p for p in order.ops_in_block[block] if order.profile.ops[order.ops[p].name].cached_extra_nbytes)
        for again in itertools.islice(inner, 1 if order.modes[block] == "selective" else 0):
            yield PeakCandidate(
                key=f"{again}-midway", position=last, block=block, recomputing=again, mid_recompute=True
            )


def _alive_inside(order: OpOrder, region: Region, position: int) -> float:
    """Return the bytes, unsplit, that are alive of a region at a candidate in it: to choose the candidate by."""
    values = order.regions.graph.values
    saved: set[str] = set()
    extra = 0.0
    for region_op in region.ops:
        if order.position[region_op.op.name] <= position:
            saved.update(order.profile.ops[region_op.op.name].saved)
            extra += order.profile.ops[region_op.op.name].saved_extra_nbytes
    op = order.ops[position]
    working = order.profile.ops[op.name].backward_extra_nbytes
    activations = [name for name in saved if values[name].kind == "activation"]
    grown = [*order.gradients[position], *order.new_gradients(op)]
    return extra + working + sum(values[name].nbytes for name in (*activations, *grown))
