"""Attention of tensors of other than four dims, for `support.any_modules`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class OneHead(nn.Module):
    """Attention without a dim for heads."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(16, 48), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(x).chunk(3, dim=-1)
        return self.outputs(F.scaled_dot_product_attention(query, key, value, is_causal=True))


class Windows(nn.Module):
    """Attention inside windows of two tokens, which have a dim of their own before the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(16, 48), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.inputs(x).view(batch, tokens // 2, 2, 3, 4, width // 4)
        query, key, value = split.permute(3, 0, 1, 4, 2, 5).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.outputs(attended.transpose(2, 3).reshape(batch, tokens, width))
