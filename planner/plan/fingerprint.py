"""Structural hashes: what a plan was made for, so that it is refused for anything else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
from torch import nn


def model_fingerprint(module: nn.Module) -> str:
    """Return a hash of the module's structure: what it is made of, not its values, device, dtype or training mode.

    It covers each submodule's FQN, class, ``extra_repr()`` and public integers (number of heads, window, ...), each
    parameter's and buffer's FQN and shape, and which names are tied. Known blind spot: behaviour set by anything else,
    such as a swapped function.
    """
    text = json.dumps(list(_structure(module)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def torch_fingerprint() -> str:
    """Return torch's minor version ("2.13"): DTensor's rules change between those, not between patches."""
    return ".".join(torch.__version__.split(".")[:2])


def _structure(module: nn.Module) -> Iterator[list[object]]:
    for fqn, submodule in module.named_modules(remove_duplicate=False):
        numbers = {
            name: value for name, value in vars(submodule).items() if type(value) is int and not name.startswith("_")
        }
        yield ["module", fqn, type(submodule).__qualname__, submodule.extra_repr(), numbers]
    first_name: dict[torch.Tensor, str] = {}
    for kind, named in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        for fqn, tensor in named:
            yield [kind, fqn, list(tensor.shape), first_name.setdefault(tensor, fqn)]
