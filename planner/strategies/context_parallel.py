"""Attention with queries, keys and values split along the sequence on one axis, and all keys gathered inside the op.

Every rank keeps its own keys and values and gathers the others' where they are needed: in the forward, and again in the
backward, which scatters the sums of their gradients. Under a causal mask the rows of the last rank see most keys. So
the sequence is cut into two halves a rank, and while the kernel runs rank r of n holds halves r and 2n - 1 - r in place
of 2r and 2r + 1: each pair sees as many keys as any other. Queries, results and both gradients change places in an
all-to-all each, in which a rank sends whole halves. Nothing is exchanged where the model has its sequences in that
order throughout (`planner.even_order`).

A half of h rows that begins at row s runs as two kernels: all keys before s, and h keys under a square causal mask.
Both results are put together by their sums of exponentials. ``executor.op_context_parallel`` does all this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.tensor import Shard

from cost_model.layout import Layout
from planner.graph import Op, Value
from planner.strategies.inner_collectives import InnerCollective

OP_NAME = "aten.scaled_dot_product_attention.default"
SEQUENCE = Shard(2)
"""Of [batch, heads, sequence, width]."""

_SUM_NBYTES = 4
"""Of a row's logarithm of summed exponentials."""


def is_causal(op: Op) -> bool:
    """Tell whether the kernel itself masks the later half."""
    return bool(op.kwargs.get("is_causal", op.args[5] if len(op.args) > 5 else False))


def may_split(op: Op, inputs: Sequence[Value]) -> bool:
    """Tell whether attention on ``inputs`` (query, key, value, perhaps a mask) can run so.

    No dropout, whose pattern the kernel would have to draw again for each part. A mask that is learned would need its
    gradient. Under a causal mask there are as many keys as queries. Not in inference: a cache of keys and values holds
    whole sequences.
    """
    query, key, _ = inputs[:3]
    dropout = op.kwargs.get("dropout_p", op.args[4] if len(op.args) > 4 else 0.0)
    masks_need_gradients = any(mask.requires_grad for mask in inputs[3:])
    trained = all(value.requires_grad for value in inputs[:3])
    square = query.shape[2] == key.shape[2] and query.shape[2] > 1
    return not dropout and not masks_need_gradients and trained and (square or not is_causal(op))


def may_join(layouts: Sequence[Layout | None]) -> bool:
    """Tell whether attention runs in ``layouts`` of its inputs: the sequence is split on one axis at most."""
    return all(layout is None or sum(place == SEQUENCE for place in layout) <= 1 for layout in layouts[:1])


def split_axis(op: Op, layouts: Sequence[Layout | None], mesh_shape: Sequence[int]) -> int | None:
    """Return the axis on which attention's sequence is split; None where it is whole, or ``op`` something else."""
    if op.target_name != OP_NAME or layouts[0] is None:
        return None
    axes = [axis for axis, place in enumerate(layouts[0]) if place == SEQUENCE and mesh_shape[axis] > 1]
    return axes[0] if axes else None


class Kernel(NamedTuple):
    """A call of the attention kernel."""

    queries: int
    keys: int
    causal: bool


class ContextWork(NamedTuple):
    """What attention takes on one rank, whose sequence is split over ``ranks``.

    Attributes:
        query, key, value: shapes of its pieces, [batch, heads, rows, width].
        itemsize: bytes of a value.
        causal: whether rows see only those before them.
        is_even: whether they come in an even order, so that no rank needs another's queries.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    itemsize: int
    ranks: int
    causal: bool
    is_even: bool = False

    @classmethod
    def of(cls, op: Op, shapes: Sequence[tuple[int, ...]], itemsize: int, ranks: int) -> ContextWork:
        """Return the work on pieces of ``shapes``, those of the inputs."""
        return cls(shapes[0], shapes[1], shapes[2], itemsize, ranks, is_causal(op), op.is_even)

    @property
    def exchanged(self) -> bool:
        """Whether ranks exchange halves of their queries and results."""
        return self.causal and not self.is_even

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The calls of rank 0, whose second half sees all that is before it; other ranks have as many scores."""
        rows, keys = self.query[2], self.key[2] * self.ranks
        if not self.causal:
            return (Kernel(rows, keys, causal=False),)
        first, last = rows // 2, rows - rows // 2
        halves = [Kernel(length, length, causal=True) for length in (first, last) if length]
        return (Kernel(last, keys - last, causal=False), *halves)

    @property
    def query_nbytes(self) -> int:
        """Of this rank's queries."""
        return math.prod(self.query) * self.itemsize

    @property
    def result_nbytes(self) -> int:
        """Of this rank's results."""
        return math.prod((*self.query[:3], self.value[3])) * self.itemsize

    @property
    def gathered_nbytes(self) -> tuple[int, int]:
        """Of all keys, and of all values."""
        return tuple(math.prod(shape) * self.ranks * self.itemsize for shape in (self.key, self.value))  # type: ignore[return-value]

    @property
    def saved_nbytes(self) -> int:
        """Kept for the backward beside queries, keys, values and results: a sum for each row."""
        return math.prod(self.query[:3]) * _SUM_NBYTES

    @property
    def products_nbytes(self) -> int:
        """Of the kernels' results that are put together: a rank has two for most of its rows."""
        return 2 * (self.result_nbytes + self.saved_nbytes) if self.causal else 0

    @property
    def forward_peak_nbytes(self) -> int:
        """Alive at once in the forward, beside the inputs."""
        moved = self.query_nbytes if self.exchanged else 0
        # Values arrive by rank, and are put in order.
        return (
            sum(self.gathered_nbytes) + moved + max(self.gathered_nbytes[1], self.products_nbytes + self.result_nbytes)
        )

    @property
    def backward_rise_nbytes(self) -> int:
        """Alive at once in the backward, beside what was kept and the gradients that it leaves."""
        gathered = sum(self.gathered_nbytes)
        leaves = gathered // self.ranks + self.query_nbytes
        if not self.causal:
            return 2 * gathered + self.query_nbytes - leaves
        # Gathered, their gradients, and those of the part that runs; queries' likewise; the result's, on its place.
        arrived = self.result_nbytes if self.exchanged else 0
        return 3 * gathered + 2 * self.query_nbytes + arrived - leaves

    @property
    def forward_nbytes(self) -> int:
        """Moved beside kernels and collectives: gathered pieces put in order; halves too, and two results made one."""
        joined = 3 * self.result_nbytes if self.causal else 0
        return 2 * sum(self.gathered_nbytes) + self._exchanged_nbytes + joined

    @property
    def backward_nbytes(self) -> int:
        """Likewise of the backward: gradients of keys are added up over the parts, and ordered for their scatter."""
        gathered = sum(self.gathered_nbytes)
        joined = 3 * gathered + 3 * self.query_nbytes if self.causal else 0
        return 4 * gathered + self._exchanged_nbytes + joined

    @property
    def _exchanged_nbytes(self) -> int:
        """Moved around the exchange of queries and results, or of their gradients: read and written."""
        return 2 * (self.query_nbytes + self.result_nbytes) if self.exchanged else 0


def collectives(
    op: Op,
    inputs: Sequence[Value],
    layouts: Sequence[Layout | None],
    shapes: Sequence[tuple[int, ...]],
    mesh_shape: Sequence[int],
) -> tuple[InnerCollective, ...]:
    """Return what attention communicates on pieces of ``shapes``."""
    axis = split_axis(op, layouts, mesh_shape)
    if axis is None:
        return ()
    work = ContextWork.of(op, shapes, inputs[0].dtype.itemsize, mesh_shape[axis])
    moved = (work.query_nbytes, work.result_nbytes) if work.exchanged else ()
    found = []
    for phase in ("forward", "backward") if inputs[0].requires_grad else ("forward",):
        kinds = [("all_gather", work.gathered_nbytes), ("all_to_all", moved)]
        if phase == "backward":
            kinds.append(("reduce_scatter", work.gathered_nbytes))
        found += [
            InnerCollective(kind=kind, axis=axis, nbytes=n, phase=phase)  # type: ignore[arg-type]
            for kind, each in kinds
            for n in each
        ]
    return tuple(found)
