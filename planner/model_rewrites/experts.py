"""The routed experts of a mixture-of-experts block as one op, and the FLOPs and bytes of that op.

The number of tokens per expert depends on the data, which a trace does not see. So experts modules are traced as one
op, whose shapes do not depend on the routing. `planner` prices the op, assuming balanced experts;
`executor.ops.experts` runs the op.

The modules are those of transformers 5.0 and later: they are called as ``experts(hidden, index, weights)`` and hold
all experts' weights in two 3-dim parameters. Routers and shared experts are modules like any other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

OP_NAME = "shardplan.experts.default"

GATE_UP_MATRICES = 2
"""Matrices in ``gate_up_proj``, one after the other along the dim that tensor parallelism shards."""

_OPTIONS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}
"""Attributes that transformers sets on experts modules, with the values that the op implements."""

_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu"}
"""Class of the activation module -> the op's name of the activation."""

_INDEX_NBYTES = 8


@torch.library.custom_op("shardplan::experts", mutates_args=())
def experts_op(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Return each token's weighted sum of its experts' results, ``[tokens, width]``.

    Each expert computes ``down @ (activation(gate @ x) * (up @ x))``.

    Args:
        hidden: the tokens, ``[tokens, width]``.
        index: the experts chosen for each token, ``[tokens, top_k]``.
        weights: the routing weights, ``[tokens, top_k]``.
        gate_up: ``[experts, 2 * inner, width]``, the gate's rows before up's.
        down: ``[experts, width, inner]``.
        activation: "silu" or "gelu".
    """
    raise NotImplementedError("this op is only traced; shard_module replaces it by executor.ops.experts")


@experts_op.register_fake
def _(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    experts, width, inner = down.shape
    torch._check(hidden.dim() == 2 and hidden.shape[1] == width, lambda: f"experts of width {width} got {hidden.shape}")
    torch._check(
        gate_up.shape == (experts, GATE_UP_MATRICES * inner, width),
        lambda: f"gate_up {tuple(gate_up.shape)} does not match down {tuple(down.shape)}",
    )
    torch._check(
        index.shape == weights.shape and index.shape[:-1] == hidden.shape[:-1],
        lambda: "index and weights need one row per token",
    )
    torch._check(min(experts, width, inner, index.shape[1]) > 0, lambda: "experts of size 0")
    torch._check(activation in _ACTIVATIONS.values(), lambda: f"unknown activation {activation!r}")
    return hidden.new_empty(hidden.shape)


def experts_activation(module: nn.Module) -> str | None:
    """Return the activation ("silu" or "gelu") of an experts module; None if the op does not implement the module."""
    if not hasattr(module, "num_experts") or any(
        getattr(module, name, None) != value for name, value in _OPTIONS.items()
    ):
        return None
    if getattr(getattr(type(module), "_apply_gate", None), "__name__", "") != "_default_apply_gate":
        return None
    if {name: tensor.dim() for name, tensor in module.named_parameters()} != {"gate_up_proj": 3, "down_proj": 3}:
        return None
    return _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)


def experts_in(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the experts modules in ``module`` that the op implements, each with its activation."""
    activations = [(part, experts_activation(part)) for part in module.modules()]
    return [(part, activation) for part, activation in activations if activation is not None]


@contextmanager
def experts_as_one_op(module: nn.Module) -> Iterator[None]:
    """Within this context, the experts modules in ``module`` call the op."""
    modules = experts_in(module)
    try:
        for part, activation in modules:
            part.__dict__["forward"] = functools.partial(_call, part, activation)
        yield
    finally:
        for part, _ in modules:
            part.__dict__.pop("forward", None)


def _call(
    module: nn.Module,
    activation: str,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    output: torch.Tensor = torch.ops.shardplan.experts(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj, activation
    )
    return output


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
        ranks: ranks that exchange tokens (expert parallelism); 1 means no exchange.
    """

    rows: int
    tokens: int
    experts: int
    inner: int
    width: int
    itemsize: int
    ranks: int = 1

    @classmethod
    def from_shapes(
        cls, shapes: Sequence[Sequence[int]], all_experts: int, itemsize: int, ranks: int = 1
    ) -> ExpertsWork:
        """Return the work on one rank.

        Args:
            shapes: shapes of this rank's shards of hidden, index, weights, gate_up and down.
            all_experts: number of experts of the block, on all ranks together.
            itemsize: bytes of an element.
            ranks: ranks that exchange tokens.
        """
        (tokens, top_k), (experts, width, inner) = shapes[1], shapes[4]
        rows = ranks * -(-tokens * top_k * experts // all_experts)
        return cls(rows, tokens, experts, inner, width, itemsize, ranks)

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
    def flops(self) -> float:
        """FLOPs of the forward: three matrices, two FLOPs per multiply-add."""
        return 6.0 * self.rows * self.width * self.inner

    def backward_flops(self, hidden: bool, gate_up: bool, down: bool) -> float:
        """Return the FLOPs of the backward; the arguments say which inputs need a gradient.

        One unit is the forward FLOPs of one of the three matrices. The gradient that passes through ``down`` always
        takes 1 unit. The gradients of ``hidden`` and ``gate_up`` take 2 units each, the gradient of ``down`` takes 1.
        """
        matrices = (2 * hidden + 2 * gate_up + down + 1) / 3
        return self.flops * matrices

    @property
    def forward_nbytes(self) -> int:
        """Bytes read and written outside the forward GEMMs: gather and sum of rows, activation, routing weights."""
        sorting = 4 * self.received_nbytes  # rows are sorted by expert, and back
        return (self.rows * (3 * self.width + 8 * self.inner) + 2 * self.tokens * self.width) * self.itemsize + sorting

    @property
    def backward_nbytes(self) -> int:
        """Bytes read and written outside the backward GEMMs.

        These are two gathers and one sum of rows, the activation, the routing weights, and the gradients of both.
        """
        sorting = 4 * self.received_nbytes
        return (self.rows * (5 * self.width + 16 * self.inner) + 2 * self.tokens * self.width) * self.itemsize + sorting

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the experts' weights on this rank."""
        return 3 * self.experts * self.width * self.inner * self.itemsize

    @property
    def saved_nbytes(self) -> int:
        """Bytes saved for backward: the gate-up GEMM's output and the index of each row's token.

        With a token exchange, the received rows are saved as well, with their routing weights and positions.
        """
        received = self.received_nbytes + (self.rows * (self.itemsize + _INDEX_NBYTES) if self.ranks > 1 else 0)
        return self.rows * (2 * self.inner * self.itemsize + _INDEX_NBYTES) + received

    @property
    def gemm_output_nbytes(self) -> int:
        """Bytes of the outputs of both forward GEMMs."""
        return self.rows * (2 * self.inner + self.width) * self.itemsize

    @property
    def forward_peak_nbytes(self) -> int:
        """Bytes live at the op's forward peak: both GEMMs' outputs, the activation between them, the op's output."""
        without_exchange = (self.rows * (3 * self.inner + self.width) + self.tokens * self.width) * self.itemsize
        if self.ranks == 1:
            return without_exchange
        # While results are sent back they exist three times: as computed, sorted by rank, and as received.
        returning = max(2 * self.received_nbytes - self.rows * self.inner * self.itemsize, 0)
        return without_exchange + self.received_nbytes + returning

    @property
    def backward_rise_nbytes(self) -> int:
        """Bytes live at the op's backward peak, less the bytes saved for backward and the gradients that it returns."""
        matrix, hidden = self.experts * self.width * self.inner, self.tokens * self.width
        exchanged = self.ranks > 1
        peak_candidates = (
            self.rows * (self.width + 3 * self.inner) - 3 * matrix - hidden,  # before any gradient exists
            self.rows * 4 * self.inner - 2 * matrix - hidden,  # the gradient of ``down`` exists
            self.rows * (self.width + 2 * self.inner) - exchanged * hidden,
            exchanged * (3 * self.rows * self.width - hidden),  # the rows' gradients are sent back
        )
        return max(peak_candidates) * self.itemsize
