"""The experts of a mixture-of-experts block as one op, and the modules that run it.

How many tokens an expert gets is in the data, which no trace sees. So in place of their own forward such modules call
one op with the shapes that all routings share; `planner` knows what it costs, `executor.ops.experts` runs it. Where
sizes are needed the experts are taken to be equally busy.

The modules are those of transformers (from 5.0 on): a call ``experts(hidden, index, weights)``, all experts' matrices
in two parameters of three dims. Routers and shared experts are modules like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

OP_NAME = "shardplan.experts.default"

GATE_UP_MATRICES = 2
"""Matrices in ``gate_up_proj``, one after the other along the dim that tensor parallelism splits."""

_OPTIONS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}
"""What transformers notes of a class of experts, and the values for which the op stands."""

_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu"}
"""By the classes that transformers has for them."""

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
    """Return for each token its experts' results, weighted and added: ``[tokens, width]`` as ``hidden``.

    Each expert computes ``down @ (activation(gate @ x) * (up @ x))``.

    Args:
        hidden: ``[tokens, width]``.
        index: of each token's experts, ``[tokens, chosen]``.
        weights: of their results, of that shape.
        gate_up: ``[experts, 2 * inner, width]``, the gates before the ups.
        down: ``[experts, width, inner]``.
        activation: "silu" or "gelu".
    """
    raise NotImplementedError("only traced: shard_module puts executor.ops.experts in its place")


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
        lambda: f"{gate_up.shape} does not go with {down.shape}",
    )
    torch._check(
        index.shape == weights.shape and index.shape[:-1] == hidden.shape[:-1], lambda: "a choice for each token"
    )
    torch._check(min(experts, width, inner, index.shape[1]) > 0, lambda: "experts without values")
    torch._check(activation in _ACTIVATIONS.values(), lambda: f"there is no activation {activation!r}")
    return hidden.new_empty(hidden.shape)


def experts_activation(module: nn.Module) -> str | None:
    """Return the activation of experts that the op stands for; None of any other module."""
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
    """Return the modules of experts in ``module``, each with its activation."""
    named = [(part, experts_activation(part)) for part in module.modules()]
    return [(part, activation) for part, activation in named if activation is not None]


@contextmanager
def experts_as_one_op(module: nn.Module) -> Iterator[None]:
    """Within it the experts in ``module`` call the op."""
    found = experts_in(module)
    try:
        for part, activation in found:
            part.__dict__["forward"] = functools.partial(_call, part, activation)
        yield
    finally:
        for part, _ in found:
            part.__dict__.pop("forward", None)


def _call(
    module: nn.Module,
    activation: str,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    found: torch.Tensor = torch.ops.shardplan.experts(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj, activation
    )
    return found


class ExpertsWork(NamedTuple):
    """What the op takes on the pieces that one rank holds, experts equally busy.

    A *row* is a token at one of its experts. Saved are the products with gates and ups; all else is computed again.

    Attributes:
        rows: of this rank's tokens at this rank's experts.
        tokens: on this rank.
        experts: on this rank.
        inner: values of an expert between its matrices, on this rank.
        width: values of a token.
        itemsize: bytes of a value.
        ranks: among which tokens go to their experts; 1: none moves.
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
        """Return the work on pieces of ``shapes``: hidden, index, weights, gate_up, down; of ``all_experts`` in all."""
        (tokens, chosen), (experts, width, inner) = shapes[1], shapes[4]
        rows = ranks * -(-tokens * chosen * experts // all_experts)
        return cls(rows, tokens, experts, inner, width, itemsize, ranks)

    @property
    def received_nbytes(self) -> int:
        """Of the rows that came from other ranks (their own included); 0 where none moves."""
        return self.rows * self.width * self.itemsize if self.ranks > 1 else 0

    @property
    def least_width(self) -> int:
        """The fewest columns that a product of rows with a matrix has, forward and backward."""
        return min(self.width, self.inner)

    @property
    def flops(self) -> float:
        """Of the forward: three matrices, a multiply-add is two."""
        return 6.0 * self.rows * self.width * self.inner

    def backward_flops(self, hidden: bool, gate_up: bool, down: bool) -> float:
        """Of the backward, where these need gradients: a product for each, and one through ``down`` in any case."""
        products = (2 * hidden + 2 * gate_up + down + 1) / 3
        return self.flops * products

    @property
    def forward_nbytes(self) -> int:
        """Moved beside the products: rows gathered, activation, weights, rows added up."""
        beside = 4 * self.received_nbytes  # sorted by expert, and back
        return (self.rows * (3 * self.width + 8 * self.inner) + 2 * self.tokens * self.width) * self.itemsize + beside

    @property
    def backward_nbytes(self) -> int:
        """Moved beside the products: rows gathered twice and added up, activation, weights, and their gradients."""
        beside = 4 * self.received_nbytes
        return (self.rows * (5 * self.width + 16 * self.inner) + 2 * self.tokens * self.width) * self.itemsize + beside

    @property
    def weight_nbytes(self) -> int:
        """Of the parameters."""
        return 3 * self.experts * self.width * self.inner * self.itemsize

    @property
    def saved_nbytes(self) -> int:
        """Kept for the backward: the first product, where each row's token is, and rows that came, with their place."""
        came = self.received_nbytes + (self.rows * (self.itemsize + _INDEX_NBYTES) if self.ranks > 1 else 0)
        return self.rows * (2 * self.inner * self.itemsize + _INDEX_NBYTES) + came

    @property
    def gemm_output_nbytes(self) -> int:
        """Of the results of both products."""
        return self.rows * (2 * self.inner + self.width) * self.itemsize

    @property
    def forward_peak_nbytes(self) -> int:
        """Alive at once in the forward: the results of both products, what lies between them, and the op's own."""
        alone = (self.rows * (3 * self.inner + self.width) + self.tokens * self.width) * self.itemsize
        if self.ranks == 1:
            return alone
        # Results are there three times as they go back: as made, in the order of ranks, and as they arrive.
        return alone + self.received_nbytes + max(2 * self.received_nbytes - self.rows * self.inner * self.itemsize, 0)

    @property
    def backward_rise_nbytes(self) -> int:
        """Alive at once in the backward, beside what was kept and the gradients that it leaves."""
        matrix, hidden = self.experts * self.width * self.inner, self.tokens * self.width
        moved = self.ranks > 1
        stages = (
            self.rows * (self.width + 3 * self.inner) - 3 * matrix - hidden,  # no gradient is there yet
            self.rows * 4 * self.inner - 2 * matrix - hidden,  # that of the second matrices is
            self.rows * (self.width + 2 * self.inner) - moved * hidden,
            moved * (3 * self.rows * self.width - hidden),  # gradients of rows go back
        )
        return max(stages) * self.itemsize
