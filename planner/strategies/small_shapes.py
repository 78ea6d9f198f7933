"""Small stand-ins for the shapes of an op's inputs, so that one answer of DTensor's serves many ops.

For ops that name no length in their arguments, DTensor's rules look at three things of a length: what divides it, which
other lengths it equals, and whether it is 1. Stand-ins that keep these three get the same answer, and all linear layers
of a transformer but the square ones get one and the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from planner.graph.op_graph import Op, Value

aten = torch.ops.aten

NAME_NO_LENGTH = frozenset(
    {
        aten.add.Tensor,
        aten.bmm.default,
        aten.cat.default,
        aten.div.Tensor,
        aten.gelu.default,
        aten.linear.default,
        aten.matmul.default,
        aten.mean.dim,
        aten.mm.default,
        aten.mul.Tensor,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        aten.relu.default,
        aten.rsqrt.default,
        aten.silu.default,
        aten.softmax.int,
        aten.sub.Tensor,
        aten.tanh.default,
        aten.to.dtype,
        aten.transpose.int,
    }
)
"""Ops whose arguments beside the tensors are dims, dtypes and factors: no length is among them."""

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)


def small(op: Op, inputs: Sequence[Value], mesh_size: int) -> Sequence[Value]:
    """Return ``inputs`` with small shapes that DTensor treats alike on any mesh of ``mesh_size`` ranks.

    Returned as they are where the op is not known to name no length.
    """
    lengths = [length for value in inputs for length in value.shape]
    if op.target not in NAME_NO_LENGTH or 0 in lengths:
        return inputs
    mesh_size = math.lcm(mesh_size, 4)  # one axis of two ranks and two such axes then get the same stand-ins
    primes = iter(prime for prime in _PRIMES if mesh_size % prime)
    known: dict[int, int] = {1: 1}
    for length in lengths:
        if length not in known:
            prime = next(primes, None)
            if prime is None:
                return inputs
            known[length] = math.gcd(length, mesh_size) * prime
    return [dataclasses.replace(value, shape=tuple(known[length] for length in value.shape)) for value in inputs]
