"""Buffers of a sharded module: plain and whole on every rank, and updated once by a checkpointed block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executor.ops.buffers.plain_writes import whole
from executor.redistribute import Redistributor

_SMALL_NBYTES = 2**20
"""Buffers up to this size are restored for a recomputation even if torch has counted no write to them."""


class WholeBuffersForward:
    """A module's forward, after which the buffers that it has replaced by DTensors are plain and whole."""

    def __init__(self, module: nn.Module, redistributor: Redistributor) -> None:
        self._module = module
        self._redistributor = redistributor
        self._forward: Callable[..., Any] = module.forward
        # Signatures are looked up on forward, by the executor and by transformers.
        functools.update_wrapper(self, self._forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        result = self._forward(*args, **kwargs)
        buffers = self._module._buffers
        for name, buffer in buffers.items():
            if isinstance(buffer, DTensor):
                buffers[name] = whole(self._redistributor, buffer.detach())
        return result


def keep_buffers_whole(root: nn.Module, redistributor: Redistributor, outside: Collection[nn.Module] = ()) -> None:
    """Wrap the forward of each module in ``root`` that has buffers, without those in the modules ``outside``."""
    excluded = {item for module in outside for item in module.modules()}
    for module in root.modules():
        if module._buffers and module not in excluded:
            module.forward = WholeBuffersForward(module, redistributor)


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
