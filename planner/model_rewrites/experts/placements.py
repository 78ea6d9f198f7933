"""Layouts of the op of experts on one mesh axis, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from planner.model_rewrites.experts.experts_op import ExpertsForm

R, P, S0 = Replicate(), Partial(), Shard(0)


class ExpertsPlacement(NamedTuple):
    """Placements on one axis.

    Attributes:
        tokens: of tokens, their experts and their routing weights.
        weights: of gate_up, down, gate_up's bias and down's bias.
        result: of the result.
        tokens_gradient: of the gradients of tokens and of routing weights.
        weight_gradients: of the gradients of ``weights``.
    """

    tokens: Placement
    weights: tuple[Placement, Placement, Placement, Placement]
    result: Placement
    tokens_gradient: Placement
    weight_gradients: tuple[Placement, Placement, Placement, Placement]


def gate_up_placement(form: ExpertsForm) -> Placement:
    """Return the placement of ``gate_up`` on an axis that shards the inner dim: each rank has the same rows of both."""
    return _up_placement(form, form.up_dim)


def experts_placements(form: ExpertsForm) -> list[ExpertsPlacement]:
    """Return the placements that the op runs in: nothing, tokens, experts, the inner dim, tokens and experts sharded.

    Where the inner dim is sharded, one rank adds the bias of ``down``; its gradient is the same on every rank.
    """
    inner = (gate_up_placement(form), Shard(form.inner_dim), _up_placement(form, 1), R)
    return [
        ExpertsPlacement(R, (R, R, R, R), R, R, (R, R, R, R)),
        ExpertsPlacement(S0, (R, R, R, R), S0, S0, (P, P, P, P)),
        ExpertsPlacement(R, (S0, S0, S0, S0), P, P, (S0, S0, S0, S0)),
        ExpertsPlacement(R, inner, P, P, inner),
        ExpertsPlacement(S0, (S0, S0, S0, S0), S0, S0, (S0, S0, S0, S0)),
    ]


def _up_placement(form: ExpertsForm, dim: int) -> Placement:
    in_turn = form.gated and not form.alternating
    return _StridedShard(dim, split_factor=form.matrices) if in_turn else Shard(dim)
