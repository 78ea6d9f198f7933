"""Keys of multi-head latent attention, put together without writing into a tensor in place.

transformers makes an empty tensor of keys and copies both halves into it. A graph of ops, each of which makes its
results from its inputs, cannot say that, and DTensor has no way to differentiate it. `torch.cat` makes the same keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_ATTRIBUTES = ("expand_kv", "kv_b_proj", "qk_nope_head_dim", "v_head_dim")


def latent_attentions(module: nn.Module) -> list[nn.Module]:
    """Return the latent attentions in ``module``; their cache holds what keys and values are made of."""
    return [part for part in module.modules() if all(hasattr(part, name) for name in _ATTRIBUTES)]


def concatenate_keys(module: nn.Module) -> list[nn.Module]:
    """Make the latent attentions in ``module`` put their keys together by concatenation, and return them."""
    found = latent_attentions(module)
    for part in found:
        part.__dict__["expand_kv"] = functools.partial(_expand, part)
    return found


@contextmanager
def keys_concatenated(module: nn.Module) -> Iterator[None]:
    """Within it the latent attentions in ``module`` do so."""
    found = concatenate_keys(module)
    try:
        yield
    finally:
        for part in found:
            del part.__dict__["expand_kv"]


def _expand(module: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [batch, heads, seq, nope + rope] and values [batch, heads, seq, width] from what is kept of them.

    Args:
        module: the attention.
        kv_nope: [batch, 1, seq, rank].
        k_rot: [batch, 1, seq, rope], one for all heads.
    """
    batch, _, seq, _ = kv_nope.shape
    widths = [module.qk_nope_head_dim, module.v_head_dim]
    both = module.kv_b_proj(kv_nope).view(batch, seq, -1, sum(widths)).transpose(1, 2)
    k_nope, values = torch.split(both, widths, dim=-1)
    return torch.cat((k_nope, k_rot.expand(-1, k_nope.shape[1], -1, -1)), dim=-1), values
