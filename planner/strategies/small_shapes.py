"""Small input shapes that DTensor's rules treat like the real shapes, so that one result serves many ops.

For ops whose arguments contain no length, DTensor's rules depend on three properties of a length: its divisors, the
other lengths that it equals, and whether it is 1. Small shapes that keep these properties get the same result. All
linear layers of a transformer then share one result, except square ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from planner.graph.op_graph import Op, Value

aten = torch.ops.aten

OPS_WITHOUT_LENGTHS = frozenset(
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
"""Ops whose arguments, apart from tensors, are dims, dtypes and factors, and no lengths."""

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)


def with_small_shapes(op: Op, inputs: Sequence[Value], mesh_size: int) -> Sequence[Value]:
    """Return ``inputs`` with small shapes that DTensor treats like the real shapes on any mesh of ``mesh_size`` ranks.

    The inputs of ops that are not in `OPS_WITHOUT_LENGTHS` are returned unchanged.
    """
    lengths = [length for value in inputs for length in value.shape]
    if op.target not in OPS_WITHOUT_LENGTHS or 0 in lengths:
        return inputs
    mesh_size = math.lcm(mesh_size, 4)  # meshes of one axis of two ranks and of two such axes then share results
    primes = iter(prime for prime in _PRIMES if mesh_size % prime)
    small: dict[int, int] = {1: 1}
    for length in lengths:
        if length not in small:
            prime = next(primes, None)
            if prime is None:
                return inputs
            small[length] = math.gcd(length, mesh_size) * prime
    return [dataclasses.replace(value, shape=tuple(small[length] for length in value.shape)) for value in inputs]
