"""Ops of ours: embedding, attention and others, by the rules of ``planner.strategies.own_rules``.

A ``TorchFunctionMode`` sees the calls before DTensor does. What a rule of ours covers runs on local pieces with
explicit layouts, forward and backward; anything else falls through to DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from executor.ops.attention import attention
from executor.ops.cat import concatenate
from executor.ops.conv2d import conv2d
from executor.ops.cross_entropy import cross_entropy
from executor.ops.embedding import embedding
from executor.ops.where import where
from executor.redistribute import Redistributor

OwnOp = Callable[..., Any]
"""Takes the redistributor and the call's arguments; returns NotImplemented where our rule does not cover the call."""

_OWN: dict[Callable[..., Any], OwnOp] = {
    F.embedding: embedding,
    torch.conv2d: conv2d,
    F.scaled_dot_product_attention: attention,
    F.cross_entropy: cross_entropy,
    torch.where: where,
    torch.cat: concatenate,
}


class OwnOps(TorchFunctionMode):
    """While entered, runs our ops wherever one of their arguments is a DTensor."""

    def __init__(self, redistributor: Redistributor, linear: OwnOp | None = None) -> None:
        """Take what runs linear layers; None leaves them to DTensor."""
        super().__init__()
        self._redistributor = redistributor
        self._own = _OWN if linear is None else {**_OWN, F.linear: linear}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        own = self._own.get(func)
        if own is not None and any(isinstance(value, DTensor) for value in _tensors(args, kwargs)):
            result = own(self._redistributor, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments, and what is in lists of them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
