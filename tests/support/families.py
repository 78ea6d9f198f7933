"""The six tiny families of models, at any batch and on any device, for the tests of the planner."""

from __future__ import annotations

from typing import Any

import torch
from support.executor_cases import BATCH, make_batch, make_model
from torch import nn

FAMILIES = ("mlp", "gpt2", "llama", "bert", "vit", "t5")
WITH_EXPERTS = ("mixtral", "deepseek")
"""Their blocks have more ops and their regions more strategies: they take longer, so fewer tests are run on them."""


def make(family: str, batch: int, device: str = "meta") -> tuple[nn.Module, dict[str, Any]]:
    """Return a model in training mode, dropout 0, and the arguments of one call with labels."""
    with torch.device(device):
        module = make_model(family)

    def resize(value: Any) -> Any:
        return value[torch.arange(batch) % BATCH].to(device) if isinstance(value, torch.Tensor) else value

    return module, {name: resize(value) for name, value in make_batch(family).items()}
