"""Modules that assign results to parts of a tensor, for `support.any_modules`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotated(nn.Module):
    """Rotates neighbouring features by their position, as video transformers and GPT-J do, into an empty tensor.

    The angles are computed with autocast off, as rotary embeddings of many models are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.autocast(x.device.type, enabled=False):
            angles = torch.arange(hidden.shape[1], device=x.device, dtype=x.dtype)[:, None]
        left, right = hidden[..., 0::2], hidden[..., 1::2]
        rotated = torch.empty_like(hidden)
        rotated[..., 0::2] = left * angles.cos() - right * angles.sin()
        rotated[..., 1::2] = left * angles.sin() + right * angles.cos()
        return self.down(rotated)


class Rolled(nn.Module):
    """Shifts the tokens by one: assigns the first by its index, and the others as a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).tanh()
        rolled = torch.zeros_like(hidden)
        rolled[:, 0] = hidden[:, -1]
        rolled[:, 1:] = hidden[:, :-1]
        return self.down(rolled)


class Collected(nn.Module):
    """Collects the steps of a loop in a tensor that is made of its shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        steps = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device)
        for step in range(hidden.shape[1]):
            steps[:, step] = hidden[:, : step + 1].mean(1)
        return self.down(steps)


class Padded(nn.Module):
    """Puts features between zeros, and adds others to some of them, in place, as adapters of joined projections do."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(16, 8), nn.Linear(16, 12)
        self.register_buffer("places", torch.tensor([0, 1, 2, 3, 8, 9, 10, 11]))

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.narrow(x)
        padded = narrow.new_zeros(*narrow.shape[:-1], 12)
        padded.index_copy_(-1, self.places, narrow)
        added = narrow.new_zeros(*narrow.shape[:-1], 12).index_add_(-1, self.places, narrow.tanh())
        return (self.wide(x) + padded * 2) * added
