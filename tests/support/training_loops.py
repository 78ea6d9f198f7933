"""What the tests of training loops share: data, plans, and the environment that torchrun gives to a process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

SEQ, VOCAB = 16, 256


def as_under_torchrun(rank: int) -> None:
    """Set what accelerate reads to learn that this process is one of several."""
    size = str(dist.get_world_size())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


class Rows(Dataset):
    """Rows of tokens; each ignores a different number of labels."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, VOCAB, (count, SEQ), generator=generator)
        self.labels = self.ids.clone()
        for row in range(count):
            self.labels[row, : row % (SEQ // 2)] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def largest_difference(module: torch.nn.Module, expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between parameters, over the largest parameter."""
    actual = {name: whole(p) for name, p in module.named_parameters()}
    assert set(actual) == set(expected)
    worst = max((actual[name] - expected[name]).abs().max().item() for name in expected)
    return worst / max(tensor.abs().max().item() for tensor in expected.values())


def parameters_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in module.named_parameters()}


def one_folder(rank: int, folder: str) -> Path:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path
