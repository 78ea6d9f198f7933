"""Forwards that loop over the samples of their batch, whose graphs serve one batch size only.

A graph for any batch is traced with very many samples. A loop over them would take minutes to trace, and its number of
ops would be right for no other batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from planner.model_rewrites.image_sizes.values import is_numbers

_PARTS = frozenset({"__iter__", "unbind", "split", "split_with_sizes", "chunk", "tensor_split", "tolist"})
_ONE_SAMPLE = frozenset({"__getitem__", "select", "narrow", "index_select"})
_MOST = 64
"""Single samples that a forward may take, such as the first of the batch, before it counts as a loop."""


class SampleLoopError(Exception):
    """A forward takes the samples of its batch one by one."""


class NoSampleLoops(TorchFunctionMode):
    """Within this context, a forward at ``batch`` samples that loops over them raises `SampleLoopError`.

    ``batch`` divides no size in the model but those that count samples.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch
        self._taken = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        source = args[0] if args and isinstance(args[0], torch.Tensor) and not is_numbers(args[0]) else None
        if source is not None and name in _PARTS and self._parts(name, source, args, kwargs) >= self._batch:
            raise SampleLoopError(name)
        result = func(*args, **kwargs)
        if source is not None and name in _ONE_SAMPLE and isinstance(result, torch.Tensor):
            self._taken += self._has_samples(source) and not self._has_samples(result)
            if self._taken > _MOST:
                raise SampleLoopError(name)
        return result

    def _parts(self, name: str, source: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return how many parts a call of the function ``name`` takes of ``source``."""
        if name == "tolist":
            return source.numel()
        at = 1 if name in {"__iter__", "unbind"} else 2
        size = source.shape[kwargs.get("dim", args[at] if len(args) > at else 0)] if source.ndim else 0
        if at == 1:
            return size
        given = args[1] if len(args) > 1 else next((value for key, value in kwargs.items() if key != "dim"), None)
        if isinstance(given, int):
            return math.ceil(size / max(given, 1)) if name == "split" else given
        return len(given) if isinstance(given, (list, tuple)) else 0

    def _has_samples(self, tensor: torch.Tensor) -> bool:
        return any(size and size % self._batch == 0 for size in tensor.shape)
