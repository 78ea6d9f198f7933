"""Parts that are split off along the first dim, and joined again: no op, until someone asks for a part.

Vision-language models split the features of all images into those of each, and join them. Split by samples, the parts
would be gathered for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, overload
from unittest import mock

import torch


class Parts(Sequence[torch.Tensor]):
    """The parts of a tensor along its first dim, which are split off when one of them is asked for.

    Attributes:
        whole: the tensor.
    """

    def __init__(self, whole: torch.Tensor, sizes: Sequence[int], split: Callable[..., Any]) -> None:
        self.whole = whole
        self._sizes, self._split = list(sizes), split
        self._parts: tuple[torch.Tensor, ...] | None = None

    def _each(self) -> tuple[torch.Tensor, ...]:
        if self._parts is None:
            self._parts = tuple(self._split(self.whole, self._sizes, 0))
        return self._parts

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[torch.Tensor, ...]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self._each()[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._each())


@contextmanager
def parts_together(applies: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Within this context, a tensor that is split into parts of given sizes and joined again stays as it is.

    Args:
        applies: whether a tensor is one of those.
    """
    with ExitStack() as stack:
        for owner, name in ((torch, "split"), (torch.Tensor, "split")):
            replaced = _split(getattr(owner, name), applies)
            stack.enter_context(mock.patch.object(owner, name, replaced))
        stack.enter_context(mock.patch.object(torch, "cat", _cat(torch.cat)))
        yield


def _split(split: Callable[..., Any], applies: Callable[[torch.Tensor], bool]) -> Callable[..., Any]:
    @functools.wraps(split)
    def parts(tensor: torch.Tensor, split_size: Any = None, dim: int = 0, **named: Any) -> Any:
        sizes = named.get("split_size_or_sections", split_size)
        if dim == 0 and isinstance(sizes, (list, tuple)) and applies(tensor):
            return Parts(tensor, sizes, split)
        return split(tensor, sizes, dim)

    return parts


def _cat(cat: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(cat)
    def joined(tensors: Any, dim: int = 0, **named: Any) -> Any:
        if isinstance(tensors, Parts) and dim == 0 and not named:
            return tensors.whole
        return cat(tuple(tensors) if isinstance(tensors, Parts) else tensors, dim, **named)

    return joined
