"""Attention on the meta device that saves and costs what a GPU's kernels save and cost.

There torch computes all scores, which no kernel of a GPU keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@contextmanager
def attention_on_meta() -> Iterator[None]:
    """Within this context, attention on meta tensors is FlashAttention, or with a mask the efficient one."""
    attention = F.scaled_dot_product_attention

    def as_on_gpu(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if not query.is_meta or query.dim() != 4 or query.shape[-1] != value.shape[-1]:
            return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        if attn_mask is None:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        bias = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]

    with mock.patch.object(F, "scaled_dot_product_attention", as_on_gpu):
        yield
