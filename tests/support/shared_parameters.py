"""Modules that read parameters of others, or by several names, for `support.any_modules`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ReadsItsChild(nn.Module):
    """Reads the weight of a child that it never calls, as `nn.MultiheadAttention` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.out = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(F.linear(x, self.inner.weight, self.inner.bias)))


class ReadsASibling(nn.Module):
    """Passes the weight of one child to another."""

    class Scale(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight.sum(1)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(16, 32), self.Scale(), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale(self.first(x), self.first.weight))


class ReadsATiedBias(nn.Module):
    """Reads a bias of its own by the name that a child has for it; nothing calls the child."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(32))
            self.decoder = nn.Linear(16, 32)
            self.decoder.bias = self.bias

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.decoder.weight.t() + self.decoder.bias

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), self.Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu()).square().mean()


class CastsATiedVector(nn.Module):
    """Two tables that share a vector, which each puts in place of a token after a cast that changes nothing."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.vector = nn.Embedding(24, 16), nn.Parameter(torch.randn(16))

        def forward(self, ids: Tensor) -> Tensor:
            rows = self.table(ids)
            return torch.where((ids == 3)[..., None], self.vector.to(rows.dtype), rows)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = self.Table(), self.Table(), nn.Linear(16, 16)
        self.second.vector = self.first.vector

    def forward(self, ids: Tensor) -> Tensor:
        return (self.last(self.first(ids)) * self.second(ids.roll(1, 1))).square().mean()


class UsesTwice(nn.Module):
    """Uses one weight before and after another module, so in two regions under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.randn(16, 32) / 4), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x @ self.weight) @ self.weight.T
