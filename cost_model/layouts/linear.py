"""Layouts in which each rank runs a linear layer on its own shards alone, forward and backward.

The executor runs such layers itself (`executor.ops.linear`), and the planner relies on it. Each axis of a mesh is
independent of the others. DTensor runs linear layers in all other layouts.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout

R, P = Replicate(), Partial()


class LinearGradients(NamedTuple):
    """Layouts of the gradients of a linear layer's input, weight and bias."""

    input: Layout
    weight: Layout
    bias: Layout


def linear_layout(input: Layout, weight: Layout, bias: Layout | None = None, *, last_dim: int) -> Layout | None:
    """Return the layout of a linear layer's output, whose last dim is ``last_dim``; None where it is not covered.

    On each axis the rows are sharded, or the outputs, or the inputs (the output is then partial), or nothing is.
    """
    output: list[Placement] = []
    for axis, (input_place, weight_place) in enumerate(zip(input, weight, strict=True)):
        bias_place: Placement = R
        if input_place == R and weight_place == Shard(0):
            output.append(Shard(last_dim))
            bias_place = Shard(0)
        elif input_place == Shard(last_dim) and weight_place == Shard(1):
            output.append(P)
        elif weight_place == R and (input_place == R or _shards_rows(input_place, last_dim)):
            output.append(input_place)
        else:
            return None
        if bias is not None and bias[axis] != bias_place:
            return None
    return tuple(output)


def linear_gradients(gradient: Layout, input: Layout, weight: Layout, *, last_dim: int) -> LinearGradients | None:
    """Return the layouts of the gradients in a covered layer; None if that of the output needs to be redistributed.

    Args:
        gradient: layout of the output's gradient.
        input: layout of the input.
        weight: layout of the weight.
        last_dim: last dim of the input and the output.
    """
    gradients: list[tuple[Placement, Placement, Placement]] = []
    for grad_place, input_place, weight_place in zip(gradient, input, weight, strict=True):
        if weight_place == Shard(0) and grad_place == Shard(last_dim):
            gradients.append((P, Shard(0), Shard(0)))
        elif weight_place == Shard(1) and grad_place == R:
            gradients.append((Shard(last_dim), Shard(1), R))
        elif weight_place == R and input_place == R and grad_place in (R, P):
            gradients.append((grad_place, grad_place, grad_place))
        elif weight_place == R and input_place != R and grad_place == input_place:
            gradients.append((input_place, P, P))
        else:
            return None
    return LinearGradients(*(tuple(places) for places in zip(*gradients, strict=True)))


def _shards_rows(placement: Placement, last_dim: int) -> bool:
    return type(placement) is Shard and placement.dim < last_dim
