"""The shapes of the kernels that ops run: of a GEMM, of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class GemmShape(NamedTuple):
    """The shape of a GEMM: ``batch`` times ``[m, k] @ [k, n]``."""

    m: int
    n: int
    k: int
    batch: int = 1


def gemm_shape(target_name: str, shapes: Sequence[Shape], output: Shape) -> GemmShape | None:
    """Return the GEMM that an op runs; None if it runs none, or a kind that this function does not cover.

    Args:
        target_name: the op, such as ``aten.linear.default``.
        shapes: shapes of the inputs; of a linear ``[..., k]`` and ``[n, k]``.
        output: shape of the result.
    """
    name = target_name.removeprefix("aten.").partition(".")[0]
    if name == "linear":
        return GemmShape(m=math.prod(shapes[0][:-1]), n=shapes[1][0], k=shapes[0][-1])
    if name == "addmm":
        return GemmShape(m=shapes[1][0], n=shapes[2][1], k=shapes[1][1])
    if name in ("mm", "bmm", "matmul") and len(shapes[0]) > 1 and len(shapes[1]) > 1:
        if len(shapes[1]) == 2:
            # Of two activations, a rank may hold a part of the columns, and gather the others (`matmul_rules`).
            return GemmShape(m=math.prod(shapes[0][:-1]), n=output[-1], k=shapes[0][-1])
        return GemmShape(m=output[-2], n=output[-1], k=shapes[0][-1], batch=math.prod(output[:-2]))
    if name in ("conv2d", "convolution") and len(output) == 4:
        weight = shapes[1]
        return GemmShape(m=output[0] * math.prod(output[2:]), n=output[1], k=math.prod(weight[1:]))
    return None


def with_heads(shape: Shape) -> Shape:
    """Return the shape of an argument of attention as [batch, heads, seq, head_dim]: the last dim before seq is heads.

    Of three dims, none is heads.
    """
    *leading, seq, head_dim = shape
    *batch, heads = leading if len(leading) > 1 else (*leading, 1)
    return math.prod(batch), heads, seq, head_dim
