"""Peak candidates of training: the points of the backward pass at which memory can peak.

The backward pass frees saved tensors while it allocates gradients, so that activations and gradients never all exist at
the same time. A *peak candidate* is the backward of one op. At that time, live bytes are
- tensors saved by this op and earlier ops. In a checkpointed block, these are ops of the block: earlier blocks are not
  recomputed yet;
- gradients of parameters that only later ops use;
- gradients of activations from later ops that earlier ops still need;
- tensors that the op's backward allocates.
A checkpointed block has further candidates in its recomputation: after the last op that saves a tensor, after the next
op that reads a result of that op, and, with selective checkpointing, in the first op that has cached GEMM results
inside.

From the first to the last of equal blocks, live bytes change linearly, so that they peak at one end. Each region class
therefore has candidates in its first two and last two members, each at the op with the most live bytes. (Two, because
the first block runs its backward without prefetching another block's parameters, and the last one without reducing
another block's gradients.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.ilp.quantities import Quantity, live
from planner.liveness.op_order import OpOrder
from planner.regions.regions import Region

ENDS = 2
"""Number of members at each end of a region class that have candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakCandidate:
    """The backward of one op, or a point of the recomputation before it. In inference, the forward of one op.

    Attributes:
        key: unique name.
        position: position of the op in the graph.
        block: FQN of the checkpointed block that the op is in; None: it is in none.
        recomputing: position of the op that is recomputed at the candidate; None: none is.
        mid_recompute: whether ``recomputing`` still runs, so that its results do not exist yet.
    """

    key: str
    position: int
    block: str | None
    recomputing: int | None = None
    mid_recompute: bool = False

    @property
    def recomputed_until(self) -> int:
        """Position of the last op up to which the block has been recomputed."""
        return self.recomputing - 1 if self.mid_recompute and self.recomputing is not None else self.position

    def quantity(self, role: str) -> Quantity:
        """Return the `Quantity` (a key, not a number) that sums the live bytes of ``role`` at this candidate."""
        return live(self.key, role)


UPDATE = PeakCandidate(key="update", position=-1, block=None)
"""The optimizer's step, as the backward of an op before all others: all gradients are alive, and no activations."""


def find_peak_candidates(order: OpOrder) -> tuple[PeakCandidate, ...]:
    """Return the peak candidates: the optimizer's step, then those at ops by position, then those in recomputations."""
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
    """Yield the peak candidates in the recomputation of blocks.

    The first op in the block's backward that needs a saved tensor starts the recomputation.
    """
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
        # The cached results of later ops are alive too: live bytes peak while the first op with GEMMs inside runs.
        inner = (p for p in order.ops_in_block[block] if order.profile.ops[order.ops[p].name].cached_extra_nbytes)
        for again in itertools.islice(inner, 1 if order.modes[block] == "selective" else 0):
            yield PeakCandidate(
                key=f"{again}-midway", position=last, block=block, recomputing=again, mid_recompute=True
            )


def _alive_inside(order: OpOrder, region: Region, position: int) -> float:
    """Return a region's unsharded live bytes at the backward of the op at ``position``, to choose its candidate."""
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
