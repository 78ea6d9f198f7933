"""`ContextParallelWork`: kernels, bytes moved and live bytes of one rank in context-parallel attention.

`planner.strategies.context_parallel` describes the algorithm. The formulas follow what the executor allocates and
copies (``executor.ops.context_parallel``); tests measure both on meta tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from planner.graph.op_graph import Op
from planner.plan.token_order import backward_head_parts
from planner.strategies.axis_rule import Kernel

_LOGSUMEXP_NBYTES = 4
"""Bytes of a row's log-sum-exp, in float32."""


def is_causal(op: Op) -> bool:
    """Return whether attention's own kernel applies a causal mask."""
    return bool(op.kwargs.get("is_causal", op.args[5] if len(op.args) > 5 else False))


class ContextParallelWork(NamedTuple):
    """Attention on one rank, with the sequence split over ``ranks`` ranks.

    Attributes:
        query, key, value: shapes of the rank's shards, [batch, heads, seq, head_dim].
        itemsize: bytes per element.
        causal: whether a query sees only the keys up to its own position.
        is_zigzag: whether the sequence is in zigzag order throughout the model, so that no chunks are exchanged.
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
        """Return the work of attention whose inputs have local shapes ``shapes``."""
        return cls(shapes[0], shapes[1], shapes[2], itemsize, ranks, is_causal(op), op.is_zigzag)

    @property
    def own_keys_first(self) -> bool:
        """Whether a rank attends to its own keys while it receives the other ranks' keys."""
        return self.causal and self.is_zigzag

    @property
    def exchanges_chunks(self) -> bool:
        """Whether ranks exchange chunks of queries, results and their gradients."""
        return self.causal and not self.is_zigzag

    # --- kernels -------------------------------------------------------------------------------------------------

    @property
    def own_backward_kernels(self) -> tuple[Kernel, ...]:
        """The backward's kernels over the rank's own keys, each for about half of the heads.

        The first runs before the kernels over the other ranks' keys, the second runs after these kernels. A single head
        has only the first.
        """
        rows = self.query[2]
        return tuple(
            Kernel(rows, rows, True, len(heads), len(kv_heads))
            for heads, kv_heads in backward_head_parts(self.query[1], self.key[1])
        )

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The forward's kernels on rank 0, whose last chunk sees all earlier keys. All ranks compute as many scores."""
        rows, keys, heads = self.query[2], self.key[2] * self.ranks, (self.query[1], self.key[1])
        if not self.causal:
            return (Kernel(rows, keys, False, *heads),)
        first, last = rows // 2, rows - rows // 2
        if self.is_zigzag:
            return Kernel(rows, rows, True, *heads), Kernel(last, keys - rows, False, *heads)
        chunks = [Kernel(length, length, True, *heads) for length in (first, last) if length]
        return (Kernel(last, keys - last, False, *heads), *chunks)

    @property
    def backward_kernels(self) -> tuple[Kernel, ...]:
        """The backward's kernels on rank 0."""
        return (*self.own_backward_kernels, *self.kernels[1:]) if self.own_keys_first else self.kernels

    # --- bytes of tensors ----------------------------------------------------------------------------------------

    @property
    def query_nbytes(self) -> int:
        """Bytes of this rank's queries."""
        return math.prod(self.query) * self.itemsize

    @property
    def result_nbytes(self) -> int:
        """Bytes of this rank's results."""
        return math.prod((*self.query[:3], self.value[3])) * self.itemsize

    @property
    def own_keys_nbytes(self) -> int:
        """Bytes of this rank's keys and values."""
        return sum(math.prod(shape) for shape in (self.key, self.value)) * self.itemsize

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the keys and values of all ranks."""
        return self.own_keys_nbytes * self.ranks

    @property
    def _other_keys_nbytes(self) -> int:
        """Bytes of the keys and values of the other ranks."""
        return self.gathered_nbytes - self.own_keys_nbytes

    @property
    def saved_nbytes(self) -> int:
        """Bytes saved for backward in addition to queries, keys, values and results: a log-sum-exp per row."""
        return math.prod(self.query[:3]) * _LOGSUMEXP_NBYTES

    @property
    def partial_results_nbytes(self) -> int:
        """Bytes of the kernels' results before they are merged: most rows have two results; 0 if nothing is merged."""
        return 2 * (self.result_nbytes + self.saved_nbytes) if self.causal else 0

    @property
    def _chunk_result_nbytes(self) -> int:
        """Bytes of one kernel's results for one of the rank's two chunks."""
        return (self.result_nbytes + self.saved_nbytes) // 2

    # --- live bytes ----------------------------------------------------------------------------------------------

    @property
    def forward_peak_nbytes(self) -> int:
        """Peak of live bytes in the forward, beyond the inputs."""
        gathered, other_keys, chunk_result = self.gathered_nbytes, self._other_keys_nbytes, self._chunk_result_nbytes
        if self.own_keys_first:
            # The result over the own keys exists already. First, the all-gathered keys are copied into the order of
            # the mask. Later, two results are merged with a weight per row: rank 0 merges one chunk over all other
            # keys, the last rank merges both chunks over half of the other keys.
            weights = self.saved_nbytes
            reordering = gathered + other_keys + 2 * chunk_result
            merging_on_first = other_keys + 5 * chunk_result + weights
            merging_on_last = other_keys // 2 + 6 * chunk_result + 2 * weights
            return max(reordering, merging_on_first, merging_on_last)
        exchanged = self.query_nbytes if self.exchanges_chunks else 0
        kernels = gathered + exchanged + max(gathered, self.partial_results_nbytes + self.result_nbytes)
        if not self.exchanges_chunks:
            return kernels
        # The exchange of results has four copies: as computed, as sent, as received, and in order.
        return max(kernels, exchanged + 4 * self.result_nbytes + self.saved_nbytes)

    @property
    def backward_rise_nbytes(self) -> int:
        """Peak of live bytes in the backward, beyond saved tensors and the gradients that it returns."""
        gathered, query = self.gathered_nbytes, self.query_nbytes
        if self.own_keys_first:
            return max(self._backward_rise_on(rank) for rank in {0, 1, self.ranks - 1})
        gradient_nbytes = self.own_keys_nbytes + query
        if not self.causal:
            # All-gathered keys and their gradients; or the gradient of queries, and its copy in the queries' format.
            return max(2 * gathered + query, 2 * query + self.own_keys_nbytes) - gradient_nbytes
        # All-gathered keys, their gradients, and the current kernel's gradients of keys; both gradients of queries; the
        # exchanged gradient of the result. Later, the gradient of queries is exchanged, in four copies.
        kernels = 3 * gathered + 2 * query + self.result_nbytes
        return max(kernels, gathered + self.result_nbytes + 4 * query) - gradient_nbytes

    def _backward_rise_on(self, rank: int) -> int:
        """Return `backward_rise_nbytes` of one rank, for attention with ``own_keys_first``."""
        own, gathered, query = self.own_keys_nbytes, self.gathered_nbytes, self.query_nbytes
        # The other ranks have 2n - 2 chunks. Rank r's first chunk sees r of them, and its last chunk sees all but r.
        masked_keys = self._other_keys_nbytes * rank // (2 * self.ranks - 2)
        visible_keys, seen_by_both = self._other_keys_nbytes - masked_keys, masked_keys if rank < self.ranks - 1 else 0
        rows_with_other_keys = query if rank else query // 2
        parts = self.own_backward_kernels
        own_key_gradients = sum(part.kv_heads for part in parts) * own // self.key[1]
        first_part = query * parts[0].heads // self.query[1] + own * parts[0].kv_heads // self.key[1]
        reordering = first_part + gathered + visible_keys
        kernels = first_part + 2 * visible_keys + seen_by_both + rows_with_other_keys
        filling_buffer = first_part + rows_with_other_keys + visible_keys + gathered
        sending = gathered + own + query + rows_with_other_keys + own_key_gradients
        adding = 2 * query + rows_with_other_keys + own + own_key_gradients
        return max(reordering, kernels, filling_buffer, sending, adding) - query - own

    # --- bytes moved ---------------------------------------------------------------------------------------------

    @property
    def forward_nbytes(self) -> int:
        """Bytes read and written outside of kernels and collectives in the forward.

        Keys and values are copied into one buffer before the all-gather, and put in order after the all-gather. Chunks
        are copied before and after their exchange. Two results are merged into one.
        """
        merged = 3 * self.result_nbytes if self.causal else 0
        ordered = self._other_keys_nbytes if self.own_keys_first else self.gathered_nbytes
        return 2 * (self.own_keys_nbytes + ordered) + self._exchange_nbytes + merged

    @property
    def backward_nbytes(self) -> int:
        """Bytes read and written outside of kernels and collectives in the backward.

        The backward makes the copies of the forward. It also adds the kernels' gradients of keys, and puts the sums in
        order for the reduce-scatter.
        """
        own, gathered, query = self.own_keys_nbytes, self.gathered_nbytes, self.query_nbytes
        if self.own_keys_first:
            # Gradients of the own keys are added to the result of the reduce-scatter.
            own_key_gradients = sum(part.kv_heads for part in self.own_backward_kernels) * own // self.key[1]
            return 2 * own + 3 * self._other_keys_nbytes + gathered + 3 * query + 3 * own_key_gradients
        added = 3 * gathered + 3 * query if self.causal else 0
        return 2 * own + 4 * gathered + self._exchange_nbytes + added

    @property
    def _exchange_nbytes(self) -> int:
        """Bytes read and written to copy queries and results, or their gradients, before and after their exchange."""
        return 2 * (self.query_nbytes + self.result_nbytes) if self.exchanges_chunks else 0
