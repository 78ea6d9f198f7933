"""Uneven shards: a dim that an axis does not divide, split as `torch.chunk` does, in equal pieces but for the last.

All that is priced follows from the largest piece. So the planner counts such a dim as rounded up to a length that every
axis divides, and looks up the true length where that matters: for the bytes of collectives and the rows of GEMMs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch.distributed.tensor import Shard

from cost_model.layouts.layout import Layout, shard_counts, sharded_dim

LEAST_PIECE = 64
"""Least mean length of the pieces of an uneven split. The largest piece is longer than the mean by at most 1/64."""

_RARE_FACTOR = 29
"""Least prime factor that marks a length which is rounded up."""

Rounded = Mapping[int, int]
"""Length that is rounded up -> true length."""


def may_be_uneven(length: int, pieces: int) -> bool:
    """Return whether a dim of ``length`` is long enough for ``pieces`` uneven pieces, none of which is empty."""
    return length >= LEAST_PIECE * pieces and length > pieces * pieces


def rounded_length(length: int, per_node: int, devices: int) -> int:
    """Return the length at which the pieces of a vocabulary are counted.

    It is ``length`` itself where the devices of a node divide it, or it is too short (`may_be_uneven`); otherwise it is
    rounded up to a multiple of all devices, or of those of a node where there are too many. The largest piece then has
    a prime factor that is rare in other lengths, such as numbers of tokens: they are not to be taken for this one.
    """
    least = per_node if per_node > 1 else devices
    if length % least == 0 or not may_be_uneven(length, least):
        return length
    multiple = devices if may_be_uneven(length, devices) else least
    piece = math.ceil(length / multiple)
    while largest_factor(piece) < _RARE_FACTOR:
        piece += 1
    return piece * multiple


def largest_factor(number: int) -> int:
    """Return the largest prime factor of a number above 1."""
    factor = 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            number //= factor
    return number


def shards_once(shape: Sequence[int], layout: Layout, rounded: Rounded) -> bool:
    """Return whether at most one axis shards each dim of ``shape`` whose length is rounded up, and in chunks."""
    if not rounded:
        return True
    seen = set[int]()
    for placement in layout:
        dim = sharded_dim(placement)
        if dim is None or shape[dim] not in rounded:
            continue
        if dim in seen or type(placement) is not Shard:
            return False
        seen.add(dim)
    return True


def piece_shape(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], rounded: Rounded) -> tuple[int, ...]:
    """Return the shape of the largest shard of a tensor in ``layout``.

    Args:
        shape: global shape, in which some lengths are rounded up.
        layout: a layout that shards ``shape`` evenly.
        mesh_shape: sizes of the mesh axes.
        rounded: the lengths that are rounded up.
    """
    counts = shard_counts(layout, mesh_shape, len(shape))
    return tuple([-(-rounded.get(length, length) // count) for length, count in zip(shape, counts, strict=True)])


def piece_numel(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], rounded: Rounded) -> int:
    """Return the number of elements of the largest shard of a tensor, as `piece_shape` has it."""
    return math.prod(piece_shape(shape, layout, mesh_shape, rounded))
