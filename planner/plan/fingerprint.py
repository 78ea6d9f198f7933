"""Fingerprints of the model's structure and of torch's version. A plan is rejected for any other model or torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
from torch import nn

_FORMER_NAMES = {"FusedGateUpMLP": "PackedGatedMLP"}
"""Current name of a renamed class -> its former name, which the hash uses so that existing plans still match."""


def model_fingerprint(module: nn.Module) -> str:
    """Return a hash of the module's structure, 32 hexadecimal digits; values, device, dtype and mode do not count.

    The hash covers each submodule's FQN, class, ``extra_repr()`` and public integers (number of heads, window), each
    parameter's and buffer's FQN and shape, and which names are tied. It does not see behaviour that is set in any other
    way, such as a function that was replaced.
    """
    text = json.dumps(list(_structure(module)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def torch_fingerprint() -> str:
    """Return torch's minor version, such as "2.13": DTensor's rules change with minor versions, not with patches."""
    return ".".join(torch.__version__.split(".")[:2])


def _structure(module: nn.Module) -> Iterator[list[object]]:
    for fqn, submodule in module.named_modules(remove_duplicate=False):
        numbers = {
            name: value for name, value in vars(submodule).items() if type(value) is int and not name.startswith("_")
        }
        kind = type(submodule).__qualname__
        # Those of lists and dicts of parameters show dtypes and devices.
        shown = "" if isinstance(submodule, (nn.ParameterList, nn.ParameterDict)) else submodule.extra_repr()
        yield ["module", fqn, _FORMER_NAMES.get(kind, kind), shown, numbers]
    first_name: dict[torch.Tensor, str] = {}
    for kind, tensors in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        for fqn, tensor in tensors:
            yield [kind, fqn, list(tensor.shape), first_name.setdefault(tensor, fqn)]
