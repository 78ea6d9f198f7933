"""Buffers of a sharded module: plain and whole on every rank, and updated once by a checkpointed block."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executor.ops.buffer_writes import whole
from executor.redistribute import Redistributor

_SMALL_NBYTES = 2**20
"""Buffers up to this size are restored for a recomputation even if torch has counted no write to them."""


class WholeBuffers:
    """A forward hook on the root: a buffer that the forward has replaced by a DTensor becomes plain and whole."""

    def __init__(self, root: nn.Module, redistributor: Redistributor, outside: Collection[nn.Module] = ()) -> None:
        """Select the modules in ``root`` that have buffers, without those in the modules ``outside``."""
        excluded = {item for module in outside for item in module.modules()}
        self._owners = [item for item in root.modules() if item._buffers and item not in excluded]
        self._redistributor = redistributor

    def attach(self, root: nn.Module) -> None:
        """Hook ``root``, if any module has buffers; the hook needs the contexts of the run, and no exception."""
        if self._owners:
            root.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Replace DTensors among the buffers."""
        with torch.no_grad():
            for owner in self._owners:
                for name, buffer in owner._buffers.items():
                    if isinstance(buffer, DTensor):
                        owner._buffers[name] = whole(self._redistributor, buffer)


@dataclass(frozen=True, slots=True)
class _Saved:
    owner: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    value: torch.Tensor

    @property
    def is_written(self) -> bool:
        """Whether the buffer was replaced, or may have been written to since."""
        return (
            self.buffer.nbytes <= _SMALL_NBYTES
            or self.owner._buffers.get(self.name) is not self.buffer
            or self.buffer._version != self.version
        )


class BuffersBefore:
    """The buffers of a block as they were before its forward, for a recomputation of that forward."""

    def __init__(self, block: nn.Module) -> None:
        """Copy the buffers of ``block``."""
        self._saved = [
            _Saved(owner, name, buffer, buffer._version, buffer.clone())
            for owner in block.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def drop_unwritten(self) -> None:
        """Drop the copies of large buffers that the forward has not written to."""
        self._saved = [saved for saved in self._saved if saved.is_written]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Return a context in which the block sees, and may change, the buffers of before; the later ones come back."""
        current = [saved.owner._buffers[saved.name] for saved in self._saved]
        try:
            for saved in self._saved:
                saved.owner._buffers[saved.name] = saved.value.clone()
            yield
        finally:
            for saved, buffer in zip(self._saved, current, strict=True):
                saved.owner._buffers[saved.name] = buffer
