"""Multi-head latent attention (MLA) with keys that are concatenated instead of copied into an empty tensor.

transformers allocates an empty key tensor and copies the non-rotary and the rotary part of the keys into slices of it.
An op graph has no in-place writes into a slice, and DTensor cannot differentiate such writes. `torch.cat` computes the
same keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_ATTRIBUTES = ("expand_kv", "kv_b_proj", "qk_nope_head_dim", "v_head_dim")


def mla_modules(module: nn.Module) -> list[nn.Module]:
    """Return the MLA modules in ``module``; their KV cache holds latents, not keys and values."""
    return [part for part in module.modules() if all(hasattr(part, name) for name in _ATTRIBUTES)]


def concatenate_mla_keys(module: nn.Module) -> list[nn.Module]:
    """Return the MLA modules in ``module``, changed in place to concatenate their keys."""
    modules = mla_modules(module)
    for part in modules:
        part.__dict__["expand_kv"] = functools.partial(_expand_kv, part)
    return modules


@contextmanager
def mla_keys_concatenated(module: nn.Module) -> Iterator[None]:
    """Within this context, the MLA modules in ``module`` concatenate their keys."""
    modules = concatenate_mla_keys(module)
    try:
        yield
    finally:
        for part in modules:
            del part.__dict__["expand_kv"]


def _expand_kv(module: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys ``[batch, heads, seq, nope + rope]`` and values ``[batch, heads, seq, width]`` of the latents.

    Args:
        module: the attention module.
        kv_nope: latents ``[batch, 1, seq, rank]``.
        k_rot: rotary part of the keys ``[batch, 1, seq, rope]``, shared by all heads.
    """
    batch, _, seq, _ = kv_nope.shape
    widths = [module.qk_nope_head_dim, module.v_head_dim]
    keys_values = module.kv_b_proj(kv_nope).view(batch, seq, -1, sum(widths)).transpose(1, 2)
    k_nope, values = torch.split(keys_values, widths, dim=-1)
    return torch.cat((k_nope, k_rot.expand(-1, k_nope.shape[1], -1, -1)), dim=-1), values
