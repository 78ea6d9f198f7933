"""Inputs of an op in every combination of layouts, for the tests of ops of ours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cost_model.layouts.layout import Layout

Inputs = tuple[tuple[torch.Tensor, Layout], ...]


def layouts(*choices: Any) -> Iterator[tuple[Layout, ...]]:
    """Every pair, one for each axis, of one axis' placements of the inputs."""
    for first, second in itertools.product(choices, repeat=2):
        yield tuple(zip(first, second, strict=True))


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor


def close(sharded: DTensor, whole: torch.Tensor) -> bool:
    return torch.allclose(sharded.full_tensor(), whole, rtol=1e-5, atol=1e-5)
