"""Adapters of peft on a sharded module, written to files and read from them as whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from executor.loops.whole_state import whole_state_dict
from executor.runtime.sharded_root import root_of
from planner.errors import LoopError


def has_adapters(module: nn.Module) -> bool:
    """Return whether ``module`` is peft's model, around a sharded module or sharded itself."""
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def save_adapters(module: Any, folder: Path) -> None:
    """Write the adapters of peft's model ``module`` to ``folder``, as ``save_pretrained`` does. All ranks call this.

    Only the adapters are gathered, on rank 0.

    Args:
        module: peft's model.
        folder: what ``PeftModel.from_pretrained`` reads.

    Raises:
        LoopError: ``module`` is not peft's model.
    """
    _check(module)
    root_of(module)
    names = _adapter_names(module)
    whole = whole_state_dict(module, keep=names.__contains__)
    if dist.get_rank() == 0:
        module.save_pretrained(folder, state_dict=whole)
    dist.barrier()


@torch.no_grad()
def load_adapters(module: Any, folder: Path) -> None:
    """Load the adapters in ``folder`` into peft's model ``module``. All ranks call this.

    Raises:
        LoopError: ``module`` is not peft's model, or the files have other names.
    """
    _check(module)
    from peft.utils.save_and_load import load_peft_weights

    loaded = load_peft_weights(str(folder), device="cpu")
    own = dict(module.state_dict(keep_vars=True))
    targets = {_name_in_file(name, module.active_adapter): own[name] for name in _adapter_names(module)}
    if set(loaded) != set(targets):
        raise LoopError(
            f"The adapters in {str(folder)!r} have other names: missing {sorted(set(targets) - set(loaded))[:4]}, "
            f"unexpected {sorted(set(loaded) - set(targets))[:4]}.",
            what_to_do="Make the adapters with the config that the file was written with.",
        )
    for name, target in targets.items():
        value = loaded[name].to(device=target.device, dtype=target.dtype)
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)


def _check(module: Any) -> None:
    if not has_adapters(module):
        raise LoopError(
            f"{type(module).__name__} is not peft's model.", what_to_do="Pass what get_peft_model returned."
        )


def _adapter_names(module: Any) -> set[str]:
    """Return the names, in the state dict of peft's model, of what its checkpoint has."""
    from peft import get_peft_model_state_dict

    saved = set(get_peft_model_state_dict(module))
    return {name for name in module.state_dict() if _name_in_file(name, module.active_adapter) in saved}


def _name_in_file(name: str, adapter: str) -> str:
    """Return the name that a tensor of peft's model has in a file: without the name of the adapter."""
    return name.replace(f".{adapter}.", ".").removesuffix(f".{adapter}")
