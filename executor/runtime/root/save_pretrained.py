"""``save_pretrained`` of a sharded model of transformers: an error that names ``save_weights``.

transformers would write the files from one rank, which does not have the whole tensors, while the other ranks do not
know that they are asked for them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planner.errors import WeightsError


def refuse_save_pretrained(module: nn.Module) -> None:
    """Make ``save_pretrained`` of ``module`` and its submodules raise an error, unless it is given whole tensors."""
    for part in module.modules():
        save = getattr(type(part), "save_pretrained", None)
        if callable(save) and "save_pretrained" not in vars(part):
            part.__dict__["save_pretrained"] = functools.partial(_save_pretrained, save, part)


def _save_pretrained(
    save: Any, module: nn.Module, *args: Any, state_dict: Mapping[str, torch.Tensor] | None = None, **kwargs: Any
) -> Any:
    """Call transformers' own ``save_pretrained`` with a ``state_dict`` of whole tensors.

    Raises:
        WeightsError: there is no state dict, or it has DTensors.
    """
    if state_dict is not None and not any(isinstance(tensor, DTensor) for tensor in state_dict.values()):
        return save(module, *args, state_dict=state_dict, **kwargs)
    raise WeightsError(
        f"save_pretrained of a sharded {type(module).__name__} would need the shards of all ranks.",
        what_to_do="Call executor.save_weights(module, folder) on every rank; from_pretrained reads what it writes.",
    )
