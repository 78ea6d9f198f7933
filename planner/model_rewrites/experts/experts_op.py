"""The op of experts, and its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

OP_NAME = "shardplan.experts.default"

OWN_ACTIVATION = "own"
"""Activation of experts that call a function of their module."""

ACTIVATIONS = ("silu", "gelu", OWN_ACTIVATION)


class ActivationCosts(NamedTuple):
    """What an activation costs, in elements for each row and each element of an expert's hidden size.

    The activation takes the gate-up GEMM's output to the down GEMM's input; costs include the multiplication by the
    routing weight.

    Attributes:
        moved: elements read and written in the forward.
        peak: largest number of live elements in the forward, its input left out.
        backward_moved: elements read and written in the backward, which recomputes the activation.
        recompute_peak: largest number of live elements until the down GEMM's weight gradient exists.
        backward_peak: largest number of live elements after that.
    """

    moved: float
    peak: float
    backward_moved: float
    recompute_peak: float
    backward_peak: float


GATED_COSTS = ActivationCosts(moved=8, peak=1, backward_moved=16, recompute_peak=3, backward_peak=4)
"""Costs of the executor's own formulas, ``silu(gate) * up`` and ``gelu(gate) * up``."""


class ExpertsForm(NamedTuple):
    """How experts are stored and what they compute.

    Attributes:
        activation: one of `ACTIVATIONS`.
        gated: whether the first GEMM has two results, gate and up.
        alternating: whether rows of gate and up alternate, in place of all of gate's before all of up's.
        transposed: whether weights are ``[experts, in, out]``, in place of ``[experts, out, in]``.
        costs: of the activation.
    """

    activation: str
    gated: bool = True
    alternating: bool = False
    transposed: bool = False
    costs: ActivationCosts = GATED_COSTS

    @property
    def matrices(self) -> int:
        """Matrices of the first GEMM's weight."""
        return 2 if self.gated else 1

    @property
    def up_dim(self) -> int:
        """Dim of ``gate_up`` whose length is that of the first GEMM's output."""
        return 2 if self.transposed else 1

    @property
    def inner_dim(self) -> int:
        """Dim of ``down`` whose length is an expert's hidden size."""
        return 1 if self.transposed else 2


class ExpertsArguments(NamedTuple):
    """The arguments of one call of the op, in its order."""

    hidden: Any
    index: Any
    weights: Any
    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any
    activation: str
    gated: bool
    alternating: bool
    transposed: bool
    costs: Sequence[float]

    @property
    def form(self) -> ExpertsForm:
        """How the experts are stored and what they compute."""
        costs = ActivationCosts(*self.costs)
        return ExpertsForm(self.activation, self.gated, self.alternating, self.transposed, costs)


@torch.library.custom_op("shardplan::experts", mutates_args=())
def experts_op(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    gated: bool,
    alternating: bool,
    transposed: bool,
    costs: Sequence[float],
) -> torch.Tensor:
    """Return each token's weighted sum of its experts' results, ``[tokens, width]``.

    Each expert computes ``down @ activation(gate_up @ x + gate_up_bias) + down_bias``. "silu" and "gelu" stand for
    ``silu(gate) * up`` and ``gelu(gate) * up``.

    Args:
        hidden: the tokens, ``[tokens, width]``.
        index: the experts chosen for each token, ``[tokens, top_k]``.
        weights: the routing weights, ``[tokens, top_k]``.
        gate_up: ``[experts, 2 * inner, width]``, or ``[experts, inner, width]`` without a gate.
        down: ``[experts, width, inner]``.
        gate_up_bias: ``[experts, 2 * inner]`` or ``[experts, inner]``; both biases exist or neither.
        down_bias: ``[experts, width]``.
        activation, gated, alternating, transposed: the fields of `ExpertsForm`.
        costs: the fields of `ActivationCosts`.
    """
    raise NotImplementedError("this op is only traced; shard_module replaces it by executor.ops.experts")


@experts_op.register_fake
def _(*args: Any) -> torch.Tensor:
    call = ExpertsArguments(*args)
    form, hidden, index = call.form, call.hidden, call.index
    experts, inner = call.down.shape[0], call.down.shape[form.inner_dim]
    up, (tokens, width) = form.matrices * inner, hidden.shape
    expected = {
        "gate_up": (experts, width, up) if form.transposed else (experts, up, width),
        "down": (experts, inner, width) if form.transposed else (experts, width, inner),
        "gate_up_bias": (experts, up),
        "down_bias": (experts, width),
    }
    for name, shape in expected.items():
        tensor = getattr(call, name)
        if tensor is not None:
            found = tuple(tensor.shape)
            torch._check(found == shape, lambda name=name, found=found, shape=shape: f"{name} is {found}, not {shape}")
    torch._check((call.gate_up_bias is None) == (call.down_bias is None), lambda: "experts have both biases or neither")
    torch._check(
        index.shape == call.weights.shape and index.shape[:-1] == (tokens,),
        lambda: "index and weights need one row for each token",
    )
    torch._check(min(experts, width, inner, index.shape[1]) > 0, lambda: "experts of size 0")
    torch._check(form.activation in ACTIVATIONS, lambda: f"unknown activation {form.activation!r}")
    result: torch.Tensor = hidden.new_empty(hidden.shape)
    return result
