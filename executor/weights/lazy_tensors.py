"""Tensors that are read when they are needed, and only at the indices that are needed.

A ``StoredTensor`` reads from a file or from memory. The others are views of other lazy tensors: parts joined into one
tensor (fused projections, experts), rows selected from one tensor, two dims exchanged. A ``ComputedTensor`` is the
result of code that needs whole tensors.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
Indices = tuple[torch.Tensor, ...]
"""For each dim the indices to read, 1-dim, int64."""
Box = tuple[slice, ...]
"""A slice for each dim."""

_BLOCK_NBYTES = 32 * 2**20
"""Bytes of a tensor that ``read_into`` reads at a time."""
_MOST_BOXES = 64
"""Most slices that one read is divided into; beyond that the smallest slice around all of them is read."""


class LazyTensor(abc.ABC):
    """A tensor of known shape and dtype whose values are read later.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        reads_slices: whether reading a slice takes the time and memory of that slice; otherwise more is read.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, *, reads_slices: bool = True) -> None:
        self.shape, self.dtype, self.reads_slices = torch.Size(shape), dtype, reads_slices

    @abc.abstractmethod
    def read(self, indices: Indices) -> torch.Tensor:
        """Return the values at the product of ``indices``, on any device."""

    def prepared(self) -> LazyTensor:
        """Return the tensor to read from. All ranks call this, in the same order, before any of them reads."""
        return self


class StoredTensor(LazyTensor):
    """A tensor in a file or in memory, of which contiguous slices can be read."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        read_box: Callable[[Box], torch.Tensor],
        *,
        reads_slices: bool = True,
    ) -> None:
        super().__init__(shape, dtype, reads_slices=reads_slices)
        self._read_box = read_box

    def read(self, indices: Indices) -> torch.Tensor:
        """Return the values at ``indices``, read in as few slices as there are runs of consecutive indices."""
        runs = [_runs(along) for along in indices]
        if math.prod(len(along) for along in runs) == 1:
            return self._read_box(tuple(slice(start, stop) for ((start, stop),) in runs))
        if any(not along for along in runs):
            return torch.empty([len(along) for along in indices], dtype=self.dtype)
        if math.prod(len(along) for along in runs) > _MOST_BOXES:
            lows = [int(along.min()) for along in indices]
            around = tuple(slice(low, int(along.max()) + 1) for low, along in zip(lows, indices, strict=True))
            read = self._read_box(around)
            for dim, (low, along) in enumerate(zip(lows, indices, strict=True)):
                read = read.index_select(dim, (along - low).to(read.device))
            return read
        pieces = [pieces_of(along) for along in indices]
        values: torch.Tensor | None = None
        for box in itertools.product(*pieces):
            piece = self._read_box(tuple(source for source, _ in box))
            if values is None:
                values = piece.new_empty([len(along) for along in indices])
            values[tuple(place for _, place in box)] = piece
        assert values is not None
        return values


class JoinedTensor(LazyTensor):
    """Parts joined along one dim; every index of the dim belongs to one part."""

    def __init__(
        self, parts: Sequence[LazyTensor], dim: int, part_of: torch.Tensor, index_in_part: torch.Tensor
    ) -> None:
        """Take the ``parts``, which differ in ``dim`` only.

        Args:
            parts: the parts.
            dim: the dim.
            part_of: for each index of the dim, the number of its part.
            index_in_part: for each index of the dim, the index in its part.
        """
        shape = list(parts[0].shape)
        shape[dim] = len(part_of)
        super().__init__(shape, parts[0].dtype, reads_slices=all(part.reads_slices for part in parts))
        self._parts, self._dim, self._part_of, self._index_in_part = tuple(parts), dim, part_of, index_in_part

    def read(self, indices: Indices) -> torch.Tensor:
        """Return the values at ``indices``, of which each part reads its own."""
        part_of, within = self._part_of[indices[self._dim]], self._index_in_part[indices[self._dim]]
        values: torch.Tensor | None = None
        numbers: list[int] = part_of.unique().tolist()
        for number in numbers:
            at = (part_of == number).nonzero().squeeze(1)
            piece = self._parts[number].read(_replaced(indices, self._dim, within[at]))
            if len(at) == len(part_of):
                return piece
            if values is None:
                values = piece.new_empty([len(along) for along in indices])
            values.index_copy_(self._dim, at.to(piece.device), piece.to(values.dtype))
        return torch.empty([len(along) for along in indices], dtype=self.dtype) if values is None else values

    def prepared(self) -> LazyTensor:
        """Return the same parts, each prepared."""
        parts = [part.prepared() for part in self._parts]
        return JoinedTensor(parts, self._dim, self._part_of, self._index_in_part)


class SelectedTensor(LazyTensor):
    """Some rows of a tensor: indices of one of its dims."""

    def __init__(self, source: LazyTensor, dim: int, chosen: torch.Tensor) -> None:
        shape = list(source.shape)
        shape[dim] = len(chosen)
        super().__init__(shape, source.dtype, reads_slices=source.reads_slices)
        self._source, self._dim, self._chosen = source, dim, chosen

    def read(self, indices: Indices) -> torch.Tensor:
        """Return the values at ``indices`` of the rows."""
        return self._source.read(_replaced(indices, self._dim, self._chosen[indices[self._dim]]))

    def prepared(self) -> LazyTensor:
        """Return the same rows of the prepared tensor."""
        return SelectedTensor(self._source.prepared(), self._dim, self._chosen)


class TransposedTensor(LazyTensor):
    """A tensor with two dims exchanged."""

    def __init__(self, source: LazyTensor, dim0: int, dim1: int) -> None:
        super().__init__(_exchanged(source.shape, dim0, dim1), source.dtype, reads_slices=source.reads_slices)
        self._source, self._dims = source, (dim0, dim1)

    def read(self, indices: Indices) -> torch.Tensor:
        """Return the values at ``indices``, which are read at the exchanged indices."""
        return self._source.read(tuple(_exchanged(indices, *self._dims))).transpose(*self._dims)

    def prepared(self) -> LazyTensor:
        """Return the prepared tensor with the dims exchanged."""
        return TransposedTensor(self._source.prepared(), *self._dims)


class UnsqueezedTensor(LazyTensor):
    """A tensor with one more dim of size 1."""

    def __init__(self, source: LazyTensor, dim: int) -> None:
        shape = [*source.shape[:dim], 1, *source.shape[dim:]]
        super().__init__(shape, source.dtype, reads_slices=source.reads_slices)
        self._source, self._dim = source, dim

    def read(self, indices: Indices) -> torch.Tensor:
        """Return the values at ``indices``, which are 0 in the new dim."""
        values = self._source.read((*indices[: self._dim], *indices[self._dim + 1 :])).unsqueeze(self._dim)
        return values if len(indices[self._dim]) else values.narrow(self._dim, 0, 0)

    def prepared(self) -> LazyTensor:
        """Return the prepared tensor with the new dim."""
        return UnsqueezedTensor(self._source.prepared(), self._dim)


class ComputedTensor(LazyTensor):
    """A result of code that needs whole tensors: all of it is computed before a part is read."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, compute: Callable[[], torch.Tensor]) -> None:
        super().__init__(shape, dtype)
        self._compute = compute

    def read(self, indices: Indices) -> torch.Tensor:
        """Return the values at ``indices``."""
        return in_memory(self._compute()).read(indices)

    def prepared(self) -> LazyTensor:
        """Return the result, computed."""
        return in_memory(self._compute())


def in_memory(tensor: torch.Tensor) -> StoredTensor:
    """Return ``tensor`` as a lazy tensor."""
    return StoredTensor(tensor.shape, tensor.dtype, lambda box: tensor[box])


def concatenated(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Return ``parts`` one after the other along ``dim``."""
    dim %= len(parts[0].shape)
    sizes = torch.tensor([part.shape[dim] for part in parts])
    part_of = torch.repeat_interleave(torch.arange(len(parts)), sizes)
    return JoinedTensor(parts, dim, part_of, torch.cat([torch.arange(size) for size in sizes.tolist()]))


def stacked(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Return ``parts``, all of one shape, one after the other along a new ``dim``."""
    return concatenated([UnsqueezedTensor(part, dim) for part in parts], dim)


def full_indices(shape: Sequence[int]) -> Indices:
    """Return the indices of a whole tensor of ``shape``."""
    return tuple(torch.arange(size) for size in shape)


def read_into(values: torch.Tensor, tensor: LazyTensor, indices: Indices) -> None:
    """Copy ``tensor`` at ``indices`` into ``values``, cast to its dtype; by blocks of rows if it reads slices."""
    if not indices or not tensor.reads_slices:
        values.copy_(tensor.read(indices))
        return
    row_nbytes = max(math.prod(tensor.shape[1:]) * tensor.dtype.itemsize, 1)
    rows = max(_BLOCK_NBYTES // row_nbytes, 1)
    for start in range(0, len(indices[0]), rows):
        block = tensor.read((indices[0][start : start + rows], *indices[1:]))
        values[start : start + rows].copy_(block)


def write_at(values: torch.Tensor, indices: Indices, piece: torch.Tensor) -> None:
    """Copy ``piece`` to the product of ``indices`` in ``values``."""
    for box in itertools.product(*map(pieces_of, indices)):
        values[tuple(place for place, _ in box)] = piece[tuple(source for _, source in box)].to(values.device)


def _runs(indices: torch.Tensor) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of consecutive indices."""
    if not len(indices):
        return []
    ends = (indices.diff() != 1).nonzero().squeeze(1)
    starts = torch.cat([indices[:1], indices[ends + 1]])
    stops = torch.cat([indices[ends], indices[-1:]]) + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def pieces_of(indices: torch.Tensor) -> list[tuple[slice, slice]]:
    """Return (slice of the source, slice of the result) of each run of consecutive indices."""
    placed, first = [], 0
    for start, stop in _runs(indices):
        placed.append((slice(start, stop), slice(first, first + stop - start)))
        first += stop - start
    return placed


def _replaced(indices: Indices, dim: int, along: torch.Tensor) -> Indices:
    return (*indices[:dim], along, *indices[dim + 1 :])


def _exchanged(items: Sequence[T], dim0: int, dim1: int) -> list[T]:
    exchanged = list(items)
    exchanged[dim0], exchanged[dim1] = exchanged[dim1], exchanged[dim0]
    return exchanged
