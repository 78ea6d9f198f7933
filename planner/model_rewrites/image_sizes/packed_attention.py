"""Attention of packed images, each on its own pieces, in one call for all images of one size.

transformers' encoders call attention once per image, or once per window of each, unless flash attention is installed:
thousands of calls for one batch. The results are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_ASKS, _INTERFACES = "is_flash_attention_requested", "ALL_ATTENTION_FUNCTIONS"
"""Names in a file of transformers that has attention of packed images."""

_lengths: MutableMapping[Tensor, list[int]] = WeakTensorKeyDictionary()
"""Positions where images begin -> their lengths: all layers of an encoder read the same tensor, and each waits."""


@contextmanager
def packed_attention(module: nn.Module) -> Iterator[None]:
    """Within this context, attention in the encoder ``module`` runs once for all packed images of one size.

    One that runs flash attention, on a device that has it, keeps it.
    """
    files = {sys.modules.get(type(part).__module__) for part in module.modules()}
    with ExitStack() as stack:
        for file in files:
            interfaces, asks = getattr(file, _INTERFACES, None), getattr(file, _ASKS, None)
            if interfaces is not None and asks is not None:
                stack.enter_context(mock.patch.object(file, _ASKS, return_value=True))
                stack.enter_context(mock.patch.object(file, _INTERFACES, _Interfaces(interfaces)))
        yield


class _Interfaces:
    """transformers' functions for attention, of which those for packed images are replaced."""

    def __init__(self, interfaces: Mapping[str, Callable[..., Any]]) -> None:
        self._interfaces: Any = interfaces

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of the attention ``name``."""
        interface = self._interfaces.get_interface(name, default)

        def call(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            starts = kwargs.get("cu_seq_lens_q")
            if starts is None or ("flash" in (name or "") and not query.is_meta):
                return interface(module, query, key, value, *args, **kwargs)
            scale, dropout = kwargs.get("scaling"), kwargs.get("dropout", 0.0)
            return _attention(query, key, value, _lengths_of(starts), scale, dropout), None

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interfaces, name)


def _lengths_of(starts: Tensor) -> list[int]:
    if starts not in _lengths:
        _lengths[starts] = (starts[1:] - starts[:-1]).tolist()
    return _lengths[starts]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float | None, dropout: float
) -> Tensor:
    """Return the results of attention [1, pieces, heads, width].

    Args:
        query, key, value: [1, heads, pieces, width], of all images one after the other.
        lengths: pieces of each image.
        scale: factor of the scores; None: one over the root of the width.
        dropout: fraction of the scores that is dropped.
    """
    if len(set(lengths)) == 1:
        return _of_one_length(query, key, value, lengths[0], scale, dropout)
    each = torch.tensor(lengths, device="cpu")
    order = each.repeat_interleave(each).argsort(stable=True)  # images of one length follow each other
    by_length, back = order.to(query.device), order.argsort().to(query.device)
    rows = [length * lengths.count(length) for length in sorted(set(lengths))]
    groups = zip(*(t.index_select(2, by_length).split(rows, 2) for t in (query, key, value)), strict=True)
    of_groups = (
        _of_one_length(q, k, v, length, scale, dropout)
        for length, (q, k, v) in zip(sorted(set(lengths)), groups, strict=True)
    )
    return torch.cat([*of_groups], 1).index_select(1, back)


def _of_one_length(
    query: Tensor, key: Tensor, value: Tensor, length: int, scale: float | None, dropout: float
) -> Tensor:
    def by_image(tensor: Tensor) -> Tensor:
        images: Tensor = tensor[0].unflatten(1, (-1, length))
        return images.transpose(0, 1)

    shared = query.shape[1] != key.shape[1]
    result: Tensor = F.scaled_dot_product_attention(
        by_image(query), by_image(key), by_image(value), dropout_p=dropout, scale=scale, enable_gqa=shared
    )
    return result.transpose(1, 2).flatten(0, 1)[None]
