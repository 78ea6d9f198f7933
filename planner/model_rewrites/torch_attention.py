"""torch's multi-head attention, computed so that it can be split by samples: for tracing and running alike.

`F.multi_head_attention_forward` folds samples into heads and into positions, in an order that a split of the samples
does not survive. Here samples, heads and positions stay dims of their own; the results are the same.

`nn.TransformerEncoder` and ``Decoder`` look into a mask's values to find out whether it is the causal one. A graph
cannot depend on values, so that a mask counts as causal only where the caller says so. Again the results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import transformer

original: Callable[..., tuple[Tensor, Tensor | None]] = F.multi_head_attention_forward


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return results [positions, samples, width] and weights [samples, positions, keys]; arguments as in torch.

    torch's own function runs for extra keys and values, static ones, and inputs without a dim of samples.
    """
    has_extras = bias_k is not None or bias_v is not None or add_zero_attn
    if has_extras or static_k is not None or static_v is not None or query.dim() != 3:
        arguments = dict(locals())
        arguments.pop("has_extras")
        return original(**arguments)
    length, samples, width = query.shape
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    q, k, v = _projected(query, key, value, in_proj_weight, in_proj_bias, weights)

    def by_head(tensor: Tensor) -> Tensor:
        """Return [positions, samples, width] as [samples, heads, positions, width of a head]."""
        split: Tensor = tensor.unflatten(-1, (num_heads, -1))
        return split.permute(1, 2, 0, 3)

    q, k, v = by_head(q), by_head(k), by_head(v)
    may_skip_mask = is_causal and key_padding_mask is None and not need_weights
    mask = None if may_skip_mask else _mask(attn_mask, key_padding_mask, samples, num_heads, q.dtype)
    dropout = dropout_p if training else 0.0
    shown = None
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        attention = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        result = attention @ v
        shown = attention.mean(1) if average_attn_weights else attention
    else:
        result = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal and mask is None)
    joined = result.permute(2, 0, 1, 3).flatten(2)
    return F.linear(joined, out_proj_weight, out_proj_bias), shown


def _projected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor | None,
    bias: Tensor | None,
    weights: tuple[Tensor | None, ...] | None,
) -> tuple[Tensor, ...]:
    """Return the projections of query, key and value; ``packed`` holds the three weights unless they are given."""
    if weights is None and query is key and key is value:
        assert packed is not None
        return F.linear(query, packed, bias).chunk(3, -1)
    if weights is None:
        assert packed is not None
        weights = packed.chunk(3)
    biases: Any = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))  # type: ignore[arg-type]


def _mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, samples: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Return what both masks add to scores [samples, heads, positions, keys]; None: there is none."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (samples, heads)))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    added = [
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask
        for mask in masks
    ]
    return sum(added[1:], added[0]) if added else None


def _is_said_to_be_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return bool(is_causal)


@contextmanager
def attention_as_planned() -> Iterator[None]:
    """Within this context, torch's attention modules run what this module describes."""
    with (
        mock.patch.object(F, "multi_head_attention_forward", multi_head_attention_forward),
        mock.patch.object(transformer, "_detect_is_causal_mask", _is_said_to_be_causal),
    ):
        yield
