"""`split_outputs`: along which dims an op treats its inputs piece by piece, found by running it on small tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_PIECE = 2
"""Length of a piece along the dims that are split; there are two pieces."""
_MOST_ELEMENTS = 20_000_000
"""The most elements of the tensors of a trial together."""

Dims = tuple[int | None, ...]
"""For each tensor, the dim on which it is split; None: it stays whole."""


def split_outputs(
    run: Callable[[list[torch.Tensor]], Any],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    dims: Dims,
) -> Dims | None:
    """Return the dims on which the outputs of an op are split where its inputs are split on ``dims``.

    None: the op does not work piece by piece, is random, or fails on the trial's tensors.

    Args:
        run: the op, given its input tensors.
        shapes: shapes of the inputs.
        dtypes: dtypes of the inputs.
        dims: the dims on which the inputs are split.
    """
    small = [_with_length(shape, dim, 2 * _PIECE) for shape, dim in zip(shapes, dims, strict=True)]
    if sum(map(_elements, small)) > _MOST_ELEMENTS:
        return None
    generator = torch.Generator().manual_seed(0)
    tensors = [_sample(shape, dtype, generator) for shape, dtype in zip(small, dtypes, strict=True)]
    pieces = [
        [t if dim is None else t.narrow(dim, start, _PIECE) for t, dim in zip(tensors, dims, strict=True)]
        for start in (0, _PIECE)
    ]
    with torch.random.fork_rng(devices=()), torch.no_grad(), torch.device("cpu"):
        try:
            whole = _tensors(run(list(tensors)))
            halves = [_tensors(run(piece)) for piece in pieces]
        except Exception:  # noqa: BLE001  whatever the op raises on such tensors, it is not split
            return None
    found = [_joined_on(*parts) for parts in zip(whole, *halves, strict=True)]
    return None if any(dim is _NO_DIM for dim in found) else tuple(dim for dim in found if dim is not _NO_DIM)


def without_chance(name: str, leaf: Any) -> Any:
    """Return an argument of op ``name`` for a trial: 0 in place of a fraction, such as a dropout, of a random op."""
    return 0.0 if isinstance(leaf, float) and _may_be_random(name) else leaf


@functools.cache
def _may_be_random(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


_NO_DIM = -1


def _joined_on(whole: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> int | None:
    """Return the dim on which the pieces make the whole; None: each piece is the whole. `_NO_DIM`: neither."""
    if _equal(whole, first) and _equal(whole, second):
        return None
    for dim in range(whole.dim()):
        half = _with_length(tuple(whole.shape), dim, whole.shape[dim] // 2)
        if first.shape == second.shape == half and _equal(whole, torch.cat([first, second], dim)):
            return dim
    return _NO_DIM


def _with_length(shape: tuple[int, ...], dim: int | None, length: int) -> tuple[int, ...]:
    return shape if dim is None else (*shape[:dim], length, *shape[dim + 1 :])


def _elements(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _sample(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return a random tensor; integers are 0 or 1, which most indices may be."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
