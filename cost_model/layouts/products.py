"""Layouts of products of two activations, [m, k] times [k, n], as contrastive losses have them."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)

PRODUCTS_OF = {(R, R): R, (S0, R): S0, (R, S1): S1, (S1, S0): P, (S0, S1): S0}
"""(placements of [m, k] and [k, n]) -> the placement of the product [m, n]."""


def product_layout(first: Layout, second: Layout) -> Layout | None:
    """Return the layout of [m, k] in ``first`` times [k, n] in ``second``; None where the executor does not run it.

    On the axis of `gathered_axes` the second factor is gathered. If its columns are split on another axis too, it is
    not run: which collectives gather it then depends on the cluster.
    """
    pairs = list(zip(first, second, strict=True))
    gathered = gathered_axes(first, second)
    if any(pair not in PRODUCTS_OF for pair in pairs) or len(gathered) > 1 or (gathered and (R, S1) in pairs):
        return None
    return tuple(PRODUCTS_OF[pair] for pair in pairs)


def gathered_axes(first: Layout, second: Layout) -> list[int]:
    """Return the axes on which rows of the first factor meet columns of the second, which are gathered there."""
    return [axis for axis, pair in enumerate(zip(first, second, strict=True)) if pair == (S0, S1)]


def product_gradients(output: Layout, first: Layout, second: Layout) -> tuple[Layout, Layout] | None:
    """Return the layouts of the factors' gradients where that of the product arrives as ``output``; None: it may not.

    That of a gathered factor is reduced and scattered again.
    """
    result = product_layout(first, second)
    if result is None:
        return None
    gradients: list[tuple[Placement, Placement]] = []
    for arrived, expected, pair in zip(output, result, zip(first, second, strict=True), strict=True):
        if pair == (R, R):
            if arrived not in (R, P):
                return None
            gradients.append((arrived, arrived))
        elif arrived != (R if expected == P else expected):
            return None
        else:
            gradients.append((P if pair[0] == R else pair[0], P if pair[1] == R else pair[1]))
    return tuple(each[0] for each in gradients), tuple(each[1] for each in gradients)
