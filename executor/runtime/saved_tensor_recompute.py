"""Gathered copies that autograd wants to save: it gets a note instead, and the copy is made again.

Without this a gathered parameter would stay in memory from forward to backward, and sharding it would save nothing; of
an activation that tensor parallelism gathered, the plan says whether it stays.
In a checkpointed block nothing stays anyway: there its recomputation gathers, and the backward pass of the block uses
that copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from executor.torch_internals import (
    TensorSpec,
    current_saved_tensor_hooks,
    like_dtensor,
    local_of,
    spec_of,
    storage_key,
)


class CheckpointedRegion:
    """Tells whether the forward that runs is inside a checkpointed block, for the first time or again."""

    def __init__(self) -> None:
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it a checkpointed block runs."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


CopySource = Callable[[], torch.Tensor]
"""Makes the local piece of a copy again, with the same strides."""


class Remade:
    """One copy, made again at most once in a backward for all that was saved of it, and freed after its last use."""

    def __init__(self, source: CopySource) -> None:
        self._source = source
        self._local: torch.Tensor | None = None
        self._saved = 0
        self._used = 0

    def note(self) -> None:
        """Count a tensor that was saved."""
        self._saved += 1

    def local(self) -> torch.Tensor:
        """Return the local piece, made at the first call, and forgotten at the last."""
        local = self._source() if self._local is None else self._local
        self._used += 1
        last = self._used % self._saved == 0
        self._local = None if last else local
        return local


@contextmanager
def save_no_copies(copies: Mapping[DTensor, Remade]) -> Iterator[None]:
    """Within it autograd saves no tensor that shares memory with one of ``copies``.

    Backward, each copy is made again at most once, however often it was saved, and freed after its last use. Whatever
    else is saved goes the way that the hooks around this context say, those of activation checkpointing for instance.
    """
    if not copies:
        yield
        return
    remade = {storage_key(copy): again for copy, again in copies.items()}
    around = current_saved_tensor_hooks()

    def pack(tensor: torch.Tensor) -> Any:
        copy = remade.get(storage_key(tensor))
        if copy is not None:
            return _Note.of(tensor, copy)
        # torch runs only the innermost hooks. Detached, because a node that holds its own output is never freed.
        return tensor.detach() if around is None else around[0](tensor)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, _Note):
            return packed.tensor()
        return packed if around is None else around[1](packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What is kept of a saved tensor: which view of which copy it was.

    Attributes:
        size: with ``stride`` and ``offset``, of the local view.
        spec: all that a DTensor is beside its local view; None for a plain tensor.
    """

    copy: Remade
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    spec: TensorSpec | None

    @classmethod
    def of(cls, tensor: torch.Tensor, copy: Remade) -> _Note:
        copy.note()
        local, spec = tensor, None
        if isinstance(tensor, DTensor):
            local, spec = local_of(tensor), spec_of(tensor)
        return cls(
            copy=copy, size=tuple(local.shape), stride=local.stride(), offset=int(local.storage_offset()), spec=spec
        )

    def tensor(self) -> torch.Tensor:
        local = self.copy.local().as_strided(self.size, self.stride, self.offset)
        return local if self.spec is None else like_dtensor(local, self.spec)
