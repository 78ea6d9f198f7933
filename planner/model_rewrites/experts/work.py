"""FLOPs and bytes of the op of experts on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from planner.model_rewrites.experts.experts_op import ExpertsForm

_INDEX_NBYTES = 8


class ExpertsWork(NamedTuple):
    """FLOPs and bytes of the op on the shards that one rank holds, with as many rows for each expert.

    A *row* is one token at one of its experts. Backward saves the gate-up GEMM's output and recomputes the rest.

    Attributes:
        rows: rows that this rank computes: the rows of all ``ranks`` ranks that belong to this rank's experts.
        tokens: tokens on this rank.
        experts: experts on this rank.
        inner: an expert's hidden size on this rank.
        width: the model's hidden size.
        itemsize: bytes of an element.
        form: how the experts are stored and what they compute.
        biased: whether both GEMMs add a bias.
        ranks: ranks that exchange tokens (expert parallelism); 1 means no exchange.
    """

    rows: int
    tokens: int
    experts: int
    inner: int
    width: int
    itemsize: int
    form: ExpertsForm
    biased: bool = False
    ranks: int = 1

    @classmethod
    def from_shapes(
        cls, form: ExpertsForm, shapes: Sequence[Sequence[int]], all_experts: int, itemsize: int, ranks: int = 1
    ) -> ExpertsWork:
        """Return the work on one rank.

        Args:
            form: how the experts are stored and what they compute.
            shapes: shapes of this rank's shards of hidden, index, weights, gate_up, down and perhaps both biases.
            all_experts: number of experts of the block, on all ranks together.
            itemsize: bytes of an element.
            ranks: ranks that exchange tokens.
        """
        (_, width), (tokens, top_k), down = shapes[0], shapes[1], shapes[4]
        rows = ranks * -(-tokens * top_k * down[0] // all_experts)
        return cls(rows, tokens, down[0], down[form.inner_dim], width, itemsize, form, len(shapes) > 5, ranks)

    def on_busiest_rank(self, imbalance: float) -> ExpertsWork:
        """Return the work on a rank whose experts get ``imbalance`` times the mean of the rows that are exchanged."""
        return self if self.ranks == 1 else self._replace(rows=math.ceil(self.rows * imbalance))

    @property
    def received_nbytes(self) -> int:
        """Bytes of the rows that the token exchange delivers, this rank's own included; 0 without an exchange."""
        return self.rows * self.width * self.itemsize if self.ranks > 1 else 0

    @property
    def least_width(self) -> int:
        """Smallest number of columns of the op's GEMMs, forward and backward."""
        return min(self.width, self.inner)

    @property
    def matrices(self) -> int:
        """Matrices of an expert: those of the first GEMM, and ``down``."""
        return self.form.matrices + 1

    @property
    def flops(self) -> float:
        """FLOPs of the forward: two per multiply-add."""
        return 2.0 * self.matrices * self.rows * self.width * self.inner

    def backward_flops(self, hidden: bool, gate_up: bool, down: bool) -> float:
        """Return the FLOPs of the backward; the arguments say which inputs need a gradient.

        One unit is the forward FLOPs of one matrix. The gradient that passes through ``down`` always takes 1 unit. The
        gradients of ``hidden`` and ``gate_up`` take a unit for each matrix of the first GEMM, that of ``down`` takes 1.
        """
        return self.flops / self.matrices * (self.form.matrices * (hidden + gate_up) + down + 1)

    @property
    def forward_nbytes(self) -> int:
        """Bytes read and written outside the forward GEMMs: gather and sum of rows, activation, routing weights."""
        # A bias of each row is gathered (2) and added (3); that of ``down`` is multiplied by the routing weight (2).
        bias = self.biased * (5 * self.form.matrices * self.inner + 7 * self.width)
        return self._moved_nbytes(3 * self.width + self.form.costs.moved * self.inner + bias)

    @property
    def backward_nbytes(self) -> int:
        """Bytes read and written outside the backward GEMMs.

        These are two gathers and one sum of rows, the activation, the routing weights, and the gradients of both.
        """
        bias = self.biased * (2 * self.form.matrices * self.inner + 11 * self.width)
        return self._moved_nbytes(5 * self.width + self.form.costs.backward_moved * self.inner + bias)

    def _moved_nbytes(self, by_row: float) -> int:
        sorting = 4 * self.received_nbytes  # rows are sorted by expert, and back
        return round((self.rows * by_row + 2 * self.tokens * self.width) * self.itemsize) + sorting

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the experts' weights and biases on this rank."""
        biases = self.biased * (self.form.matrices * self.inner + self.width)
        return self.experts * (self.matrices * self.width * self.inner + biases) * self.itemsize

    @property
    def saved_nbytes(self) -> int:
        """Bytes saved for backward: the first GEMM's output and the index of each row's token.

        With a token exchange, the received rows are saved as well, with their routing weights and positions.
        """
        received = self.received_nbytes + (self.rows * (self.itemsize + _INDEX_NBYTES) if self.ranks > 1 else 0)
        return self.rows * (self.form.matrices * self.inner * self.itemsize + _INDEX_NBYTES) + received

    @property
    def gemm_output_nbytes(self) -> int:
        """Bytes of the outputs of both forward GEMMs."""
        return self.rows * (self.form.matrices * self.inner + self.width) * self.itemsize

    @property
    def forward_peak_nbytes(self) -> int:
        """Bytes live at the op's forward peak: outputs of GEMMs, what is computed of them, the op's output."""
        first, result = self.form.matrices * self.inner, self.tokens * self.width
        peak_candidates = [
            self.rows * 2 * first if self.biased else 0,
            self.rows * (first + self.form.costs.peak * self.inner),
            self.rows * (first + self.inner + (1 + self.biased) * self.width) + result,
        ]
        if self.ranks > 1:
            # While results are sent back they exist three times: as computed, sorted by rank, and as received.
            peak_candidates.append(self.rows * (first + 3 * self.width) + result)
        return round(max(peak_candidates) * self.itemsize) + self.received_nbytes

    @property
    def backward_rise_nbytes(self) -> int:
        """Bytes live at the op's backward peak, less the bytes saved for backward and the gradients that it returns."""
        first, costs, exchanged = self.form.matrices, self.form.costs, self.ranks > 1
        matrix, hidden = self.experts * self.width * self.inner, self.tokens * self.width
        first_bias, bias = self.biased * self.experts * first * self.inner, self.biased * self.experts * self.width
        later = first * matrix + first_bias + hidden  # gradients that exist only after the activation's backward
        peak_candidates = [
            # Before any gradient exists.
            self.rows * (self.width + costs.recompute_peak * self.inner) - matrix - bias - later,
            # The gradients of ``down`` and its bias exist.
            self.rows * costs.backward_peak * self.inner - later,
            self.rows * (self.width + first * self.inner) - exchanged * hidden,
            exchanged * (3 * self.rows * self.width - hidden),  # the rows' gradients are sent back
        ]
        if self.biased:  # the bias of each row, times the row's gradient
            rows = self.rows * (3 * self.width + (costs.recompute_peak - 1) * self.inner)
            peak_candidates.append(rows - matrix - bias - later)
        return round(max(peak_candidates) * self.itemsize)
