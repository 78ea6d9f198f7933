"""Attention with queries, keys and values split along the sequence on one axis, and all keys gathered inside the op.

Every rank keeps its own keys and values and gathers the others' where they are needed: in the forward, and again in the
backward, which scatters the sums of their gradients. Under a causal mask the rows of the last rank see most keys. So
the sequence is cut into two halves a rank, and while the kernel runs rank r of n holds halves r and 2n - 1 - r in place
of 2r and 2r + 1: each pair sees as many keys as any other. Queries, results and both gradients change places in an
all-to-all each, in which a rank sends whole halves. A half of h rows that begins at row s runs as two kernels: all keys
before s, and h keys under a square causal mask. Both results are put together by their sums of exponentials.
``executor.ops.context_parallel`` does all this.

Nothing is exchanged where the model has its sequences in that order throughout (`token_order`). A rank's two
halves are one causal kernel over its own keys then, which runs while the others' are gathered; in the backward for half
of its heads meanwhile, and for the other half while the gradients of keys go to their ranks. The others' keys are put
in the order in which its halves see them, without a mask (``executor.ops.zigzag_attention``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch.distributed.tensor import Shard

from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.layouts.layout import Layout
from planner.graph.op_graph import Op, Value
from planner.plan.token_order import backward_head_parts
from planner.strategies.inner_collectives import InnerCollective, Kernel

OP_NAME = "aten.scaled_dot_product_attention.default"
SEQUENCE = Shard(2)
"""Of [batch, heads, sequence, width]."""

_SUM_NBYTES = 4
"""Of a row's logarithm of summed exponentials."""


def is_causal(op: Op) -> bool:
    """Tell whether the kernel itself masks the later half."""
    return bool(op.kwargs.get("is_causal", op.args[5] if len(op.args) > 5 else False))


def dropout_of(op: Op) -> float:
    """Return which part of the scores attention leaves out in training."""
    return float(op.kwargs.get("dropout_p", op.args[4] if len(op.args) > 4 else 0.0))


def may_split(op: Op, inputs: Sequence[Value]) -> bool:
    """Tell whether attention on ``inputs`` (query, key, value, perhaps a mask) can run so.

    No dropout, whose pattern the kernel would have to draw again for each part. A mask that is learned would need its
    gradient. Under a causal mask there are as many keys as queries. Not in inference: a cache of keys and values holds
    whole sequences.
    """
    query, key, _ = inputs[:3]
    masks_need_gradients = any(mask.requires_grad for mask in inputs[3:])
    trained = all(value.requires_grad for value in inputs[:3])
    square = query.shape[2] == key.shape[2] and query.shape[2] > 1
    return not dropout_of(op) and not masks_need_gradients and trained and (square or not is_causal(op))


def may_join(layouts: Sequence[Layout | None]) -> bool:
    """Tell whether attention runs in ``layouts`` of its inputs: the sequence is split on one axis at most."""
    return all(layout is None or sum(place == SEQUENCE for place in layout) <= 1 for layout in layouts[:1])


def split_axis(op: Op, layouts: Sequence[Layout | None], mesh_shape: Sequence[int]) -> int | None:
    """Return the axis on which attention's sequence is split; None where it is whole, or ``op`` something else."""
    if op.target_name != OP_NAME or layouts[0] is None:
        return None
    axes = [axis for axis, place in enumerate(layouts[0]) if place == SEQUENCE and mesh_shape[axis] > 1]
    return axes[0] if axes else None


class ContextParallelWork(NamedTuple):
    """What attention takes on one rank, whose sequence is split over ``ranks``.

    Attributes:
        query, key, value: shapes of its pieces, [batch, heads, rows, width].
        itemsize: bytes of a value.
        causal: whether rows see only those before them.
        is_zigzag: whether they come in an even order, so that no rank needs another's queries.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    itemsize: int
    ranks: int
    causal: bool
    is_zigzag: bool = False

    @classmethod
    def of(cls, op: Op, shapes: Sequence[tuple[int, ...]], itemsize: int, ranks: int) -> ContextParallelWork:
        """Return the work on pieces of ``shapes``, those of the inputs."""
        return cls(shapes[0], shapes[1], shapes[2], itemsize, ranks, is_causal(op), op.is_zigzag)

    @property
    def own_first(self) -> bool:
        """Whether a rank attends to its own keys while it gets the others'."""
        return self.causal and self.is_zigzag

    @property
    def exchanged(self) -> bool:
        """Whether ranks exchange halves of their queries and results."""
        return self.causal and not self.is_zigzag

    @property
    def own_kernels(self) -> tuple[Kernel, ...]:
        """The calls over a rank's own keys in the backward, where they come first: the one before, the one after."""
        rows = self.query[2]
        return tuple(
            Kernel(rows, rows, True, len(heads), len(kv_heads))
            for heads, kv_heads in backward_head_parts(self.query[1], self.key[1])
        )

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The calls of rank 0, whose second half sees all that is before it; other ranks have as many scores."""
        rows, keys, heads = self.query[2], self.key[2] * self.ranks, (self.query[1], self.key[1])
        if not self.causal:
            return (Kernel(rows, keys, False, *heads),)
        first, last = rows // 2, rows - rows // 2
        if self.is_zigzag:
            return Kernel(rows, rows, True, *heads), Kernel(last, keys - rows, False, *heads)
        halves = [Kernel(length, length, True, *heads) for length in (first, last) if length]
        return (Kernel(last, keys - last, False, *heads), *halves)

    @property
    def backward_kernels(self) -> tuple[Kernel, ...]:
        """Those of the backward."""
        return (*self.own_kernels, *self.kernels[1:]) if self.own_first else self.kernels

    @property
    def query_nbytes(self) -> int:
        """Of this rank's queries."""
        return math.prod(self.query) * self.itemsize

    @property
    def result_nbytes(self) -> int:
        """Of this rank's results."""
        return math.prod((*self.query[:3], self.value[3])) * self.itemsize

    @property
    def own_keys_nbytes(self) -> int:
        """Of this rank's keys and values."""
        return sum(math.prod(shape) for shape in (self.key, self.value)) * self.itemsize

    @property
    def gathered_nbytes(self) -> int:
        """Of all keys and values."""
        return self.own_keys_nbytes * self.ranks

    @property
    def _others_nbytes(self) -> int:
        """Of keys and values of the other ranks."""
        return self.gathered_nbytes - self.own_keys_nbytes

    @property
    def saved_nbytes(self) -> int:
        """Kept for the backward beside queries, keys, values and results: a sum for each row."""
        return math.prod(self.query[:3]) * _SUM_NBYTES

    @property
    def gemm_output_nbytes(self) -> int:
        """Of the kernels' results that are put together: a rank has two for most of its rows."""
        return 2 * (self.result_nbytes + self.saved_nbytes) if self.causal else 0

    @property
    def _half_products_nbytes(self) -> int:
        """Of what one kernel makes for half of a rank's rows."""
        return (self.result_nbytes + self.saved_nbytes) // 2

    @property
    def forward_peak_nbytes(self) -> int:
        """Alive at once in the forward, beside the inputs."""
        gathered, others, half = self.gathered_nbytes, self._others_nbytes, self._half_products_nbytes
        if self.own_first:
            # As gathered keys are put in order; as results are put together, by their shares: on the first rank, where
            # one has half of the rows, or on the last, with fewer keys.
            shares = self.saved_nbytes
            return max(gathered + others + 2 * half, others + 5 * half + shares, others // 2 + 6 * half + 2 * shares)
        moved = self.query_nbytes if self.exchanged else 0
        kernels = gathered + moved + max(gathered, self.gemm_output_nbytes + self.result_nbytes)
        # Results that change places are there as they were, as they are sent, as they come, and in order.
        return max(kernels, moved + 4 * self.result_nbytes + self.saved_nbytes) if self.exchanged else kernels

    @property
    def backward_rise_nbytes(self) -> int:
        """Alive at once in the backward, beside what was kept and the gradients that it leaves."""
        gathered, query = self.gathered_nbytes, self.query_nbytes
        if self.own_first:
            return max(self._rise_of(rank) for rank in {0, 1, self.ranks - 1})
        leaves = self.own_keys_nbytes + query
        if not self.causal:
            # Gathered, and their gradients; or those of queries, and in the order of memory that is wanted.
            return max(2 * gathered + query, 2 * query + self.own_keys_nbytes) - leaves
        # Gathered, their gradients, and those of the part that runs; queries' likewise; the result's, on its place.
        # Then the gradient of queries changes places, as results do in the forward.
        kernels = 3 * gathered + 2 * query + self.result_nbytes
        return max(kernels, gathered + self.result_nbytes + 4 * query) - leaves

    def _rise_of(self, rank: int) -> int:
        """Return what a rank has alive in the backward, likewise, where its own keys come first."""
        own, gathered, query = self.own_keys_nbytes, self.gathered_nbytes, self.query_nbytes
        # Of the others' 2n - 2 halves its second half sees all but as many as its first half sees.
        unseen = self._others_nbytes * rank // (2 * self.ranks - 2)
        seen, twice = self._others_nbytes - unseen, unseen if rank < self.ranks - 1 else 0
        of_rows = query if rank else query // 2
        parts = self.own_kernels
        of_own = sum(part.kv_heads for part in parts) * own // self.key[1]
        before = query * parts[0].heads // self.query[1] + own * parts[0].kv_heads // self.key[1]
        in_order, kernels = before + gathered + seen, before + 2 * seen + twice + of_rows
        packed, sent = before + of_rows + seen + gathered, gathered + own + query + of_rows + of_own
        at_the_end = 2 * query + of_rows + own + of_own
        return max(in_order, kernels, packed, sent, at_the_end) - query - own

    @property
    def forward_nbytes(self) -> int:
        """Moved beside kernels and collectives: keys and values packed, gathered ones put in order; halves too, and two
        results made one."""
        joined = 3 * self.result_nbytes if self.causal else 0
        ordered = self._others_nbytes if self.own_first else self.gathered_nbytes
        return 2 * (self.own_keys_nbytes + ordered) + self._exchanged_nbytes + joined

    @property
    def backward_nbytes(self) -> int:
        """Likewise of the backward: gradients of keys are added up over the parts, and ordered for their scatter."""
        own, gathered, query = self.own_keys_nbytes, self.gathered_nbytes, self.query_nbytes
        if self.own_first:
            # Those of its own keys are added to what arrives.
            of_own = sum(part.kv_heads for part in self.own_kernels) * own // self.key[1]
            return 2 * own + 3 * self._others_nbytes + gathered + 3 * query + 3 * of_own
        joined = 3 * gathered + 3 * query if self.causal else 0
        return 2 * own + 4 * gathered + self._exchanged_nbytes + joined

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
    work = ContextParallelWork.of(op, shapes, inputs[0].dtype.itemsize, mesh_shape[axis])
    before, *after = work.own_kernels if work.own_first else (None, None)

    def keys(
        kind: CollectiveKind, phase: Literal["forward", "backward"], overlapped_with: Kernel | None
    ) -> InnerCollective:
        return InnerCollective(
            kind=kind, axis=axis, nbytes=work.gathered_nbytes, phase=phase, overlapped_with=overlapped_with
        )

    found = [keys("all_gather", "forward", work.kernels[0] if work.own_first else None)]
    if inputs[0].requires_grad:
        found += [
            keys("all_gather", "backward", before),
            keys("reduce_scatter", "backward", after[0] if after else None),
        ]
    if work.exchanged:
        found += [
            InnerCollective(kind="all_to_all", axis=axis, nbytes=nbytes, phase=phase)
            for phase in dict.fromkeys(one.phase for one in found)
            for nbytes in (work.query_nbytes, work.result_nbytes)
        ]
    return tuple(found)
