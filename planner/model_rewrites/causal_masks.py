"""`nn.TransformerEncoder` and ``Decoder`` look into a mask's values to find out whether it is the causal one.

A graph cannot depend on values. Both for tracing and in a run a mask is taken as it is, unless the caller says that it
is causal: the results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.nn.modules import transformer


def _as_told(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return bool(is_causal)


@contextmanager
def causal_only_as_told() -> Iterator[None]:
    """Within this context, a mask counts as causal only where the caller says so."""
    with mock.patch.object(transformer, "_detect_is_causal_mask", _as_told):
        yield
