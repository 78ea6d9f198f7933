"""Redistributed copies that autograd does not save: the backward redistributes their sources again.

Otherwise autograd would save an all-gathered parameter from forward to backward, and sharding the parameter would save
no memory. For an activation that tensor parallelism all-gathers, the plan says whether the copy is saved. A
checkpointed block saves only its inputs: its recomputation all-gathers again, and the block's backward uses that copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from executor.torch_internals.dtensor import (
    TensorSpec,
    current_saved_tensor_hooks,
    like_dtensor,
    local_of,
    spec_of,
    storage_key,
)


class CheckpointedRegion:
    """True while a checkpointed block runs, in its forward or its recomputation."""

    def __init__(self) -> None:
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context in which a checkpointed block runs."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


class RecomputedCopy:
    """The local tensor of a redistributed copy, recomputed at most once in a backward and freed after its last use."""

    def __init__(self, recompute: Callable[[], torch.Tensor]) -> None:
        """Take the function that redistributes the source again; its result has the strides of the copy."""
        self._recompute = recompute
        self._local: torch.Tensor | None = None
        self._saved = 0
        self._used = 0

    def count_saved(self) -> None:
        """Count a tensor that autograd would have saved."""
        self._saved += 1

    def local(self) -> torch.Tensor:
        """Return the local tensor: recomputed in the first call, and released in the last one of a backward."""
        local = self._recompute() if self._local is None else self._local
        self._used += 1
        is_last = self._used % self._saved == 0
        self._local = None if is_last else local
        return local


@contextmanager
def recompute_copies(copies: Mapping[DTensor, RecomputedCopy]) -> Iterator[None]:
    """Return a context in which autograd saves no tensor that shares memory with one of ``copies``.

    All other tensors go to the saved-tensor hooks around this context, for instance those of activation checkpointing.
    """
    if not copies:
        yield
        return
    by_storage = {storage_key(copy): recomputed for copy, recomputed in copies.items()}
    outer = current_saved_tensor_hooks()

    def pack(tensor: torch.Tensor) -> Any:
        recomputed = by_storage.get(storage_key(tensor))
        if recomputed is not None:
            return _SavedView.from_tensor(tensor, recomputed)
        # torch runs only the innermost hooks, so call the outer ones here. Without outer hooks the tensor is detached,
        # because a node that holds its own output is never freed.
        return tensor.detach() if outer is None else outer[0](tensor)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, _SavedView):
            return packed.tensor()
        return packed if outer is None else outer[1](packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedView:
    """The object that autograd saves in place of a tensor that is a view of a redistributed copy.

    Attributes:
        copy: the copy.
        size, stride, offset: size, stride and storage offset of the local view.
        dtype: dtype of the view: a complex one may be of a real copy.
        is_conj, is_neg: whether the view stands for the conjugates, or the negatives, of what is stored.
        spec: spec of the view if it is a DTensor; None for a plain tensor.
    """

    copy: RecomputedCopy
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool
    spec: TensorSpec | None

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, copy: RecomputedCopy) -> _SavedView:
        copy.count_saved()
        local, spec = tensor, None
        if isinstance(tensor, DTensor):
            local, spec = local_of(tensor), spec_of(tensor)
        return cls(
            copy=copy,
            size=tuple(local.shape),
            stride=local.stride(),
            offset=int(local.storage_offset()),
            dtype=local.dtype,
            is_conj=local.is_conj(),
            is_neg=local.is_neg(),
            spec=spec,
        )

    def tensor(self) -> torch.Tensor:
        copy = self.copy.local()
        local = torch.empty(0, dtype=self.dtype, device=copy.device)
        local.set_(copy.untyped_storage(), self.offset, self.size, self.stride)
        local = local.conj() if self.is_conj else local
        local = -local if self.is_neg else local
        return local if self.spec is None else like_dtensor(local, self.spec)
