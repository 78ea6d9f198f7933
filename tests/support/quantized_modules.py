"""Adapters on a quantized, frozen base, written with torch's ops: weights in 4 bits with scales of blocks, or in 8."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = torch.linspace(-1, 1, 16)
BLOCK = 16
"""Values of a 4-bit weight that share a scale."""


class FourBitLinear(nn.Module):
    """A linear layer whose weights are two values of `LEVELS` in a byte, [out, in / 2], and a scale for each block."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape = outputs, inputs
        packed = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(outputs, inputs // BLOCK) / 4, requires_grad=False)
        self.register_buffer("levels", LEVELS.clone())

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack((self.packed >> 4, self.packed & 15), dim=-1).view(self.shape)
        blocks = self.levels[codes.long()].view(self.shape[0], -1, BLOCK) * self.scale[:, :, None]
        return F.linear(x, blocks.view(self.shape).to(x.dtype))


class EightBitLinear(nn.Module):
    """A linear layer with weights of 8 bits, and a scale for each output feature."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(outputs, 1) / 256, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


class Adapted(nn.Module):
    """A quantized layer and a trained adapter of rank 4."""

    def __init__(self, kind: type[nn.Module], inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = kind(inputs, outputs)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class QuantizedBlock(nn.Module):
    def __init__(self, kind: type[nn.Module], width: int) -> None:
        super().__init__()
        self.rise, self.fall = Adapted(kind, width, 4 * width), Adapted(kind, 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fall(F.gelu(self.rise(x)))


class QuantizedModel(nn.Module):
    """Three residual blocks between a frozen embedding and a frozen head; returns its loss.

    Args:
        kind: `FourBitLinear` or `EightBitLinear`.
    """

    def __init__(self, kind: type[nn.Module], width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(64, width).requires_grad_(False)
        self.blocks = nn.ModuleList(QuantizedBlock(kind, width) for _ in range(3))
        self.head = nn.Linear(width, 64, bias=False).requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
