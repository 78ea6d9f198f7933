"""Adapters of peft on a sharded module, written to files and read from them as whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from cost_model.layouts.layout import Layout
from executor.loops.whole_state import whole_state_dict
from executor.redistribute import Redistributor
from executor.runtime.root.added_parameters import shard_added_parameters
from executor.runtime.root.sharded_root import root_of
from executor.torch_internals.weights import reshard
from planner.errors import LoopError


def has_adapters(module: nn.Module) -> bool:
    """Return whether ``module`` is peft's model, around a sharded module or sharded itself."""
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def add_adapters(module: nn.Module, config: Any) -> Any:
    """Return peft's model around the sharded ``module``, with new adapters. All ranks call this together.

    The adapters are replicated DTensors, with the values of rank 0, and their gradients are reduced. Make the optimizer
    after this call. The plan does not have the adapters; to plan them, call ``get_peft_model`` before ``build_plan``.

    Args:
        module: the result of ``shard_module``, whose projections are not fused.
        config: a config of peft.

    Raises:
        PlanMismatchError: ``module`` is not sharded.
        LoopError: adapters other than LoRA, or adapters that start from values of the weights, which no rank has whole.
    """
    from peft import get_peft_model

    _, root = root_of(module)
    _check_config(config)
    reshard(module)
    with _plain_stand_ins(module):
        model = get_peft_model(module, config)
    for part in model.modules():
        if isinstance(getattr(part, "base_layer", None), nn.Module):
            _AdapterOutput(root.redistributor).attach(part)
    return shard_added_parameters(model)


def _check_config(config: Any) -> None:
    """Raise a ``LoopError`` for adapters that are not LoRA, or that copy weights or start from their values."""
    asked = {
        f"peft_type={config.peft_type.value!r}": config.peft_type.value != "LORA",
        "use_dora": getattr(config, "use_dora", False),
        "modules_to_save": getattr(config, "modules_to_save", None),
        "trainable_token_indices": getattr(config, "trainable_token_indices", None),
        "init_lora_weights": getattr(config, "init_lora_weights", True) not in (True, False, "gaussian"),
    }
    refused = [name for name, is_asked in asked.items() if is_asked]
    if refused:
        raise LoopError(
            f"The config of the adapters has {', '.join(refused)}, for which no rank of a sharded module has the whole "
            "weights.",
            what_to_do="Call get_peft_model before build_plan and shard_module.",
        )


class _AdapterOutput:
    """Hooks that bring what an adapter adds to the layout of what it is added to, the result of the base layer.

    DTensor would choose a layout for the sum, in which the next op of the plan may not run.
    """

    def __init__(self, redistributor: Redistributor) -> None:
        self._redistributor = redistributor
        self._layout: Layout | None = None

    def attach(self, layer: nn.Module) -> None:
        """Hook the base layer of peft's ``layer``, and its last projection or, if it has none, the layer itself."""
        base = cast(nn.Module, layer.base_layer)
        base.register_forward_hook(self._note)
        last = getattr(layer, "lora_B", None)
        parts = [*last.children()] if isinstance(last, nn.ModuleDict) else []
        for part in parts or [layer]:
            part.register_forward_hook(self._bring)

    def _note(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._layout = tuple(output.placements) if isinstance(output, DTensor) else None

    def _bring(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._layout is None or not isinstance(output, torch.Tensor):
            return output
        return self._redistributor.redistribute(output, self._layout)


@contextmanager
def _plain_stand_ins(module: nn.Module) -> Iterator[None]:
    """Return a context in which every DTensor parameter is a plain tensor of the same shape, without memory of its own.

    peft sizes an adapter by the local tensor of a DTensor.
    """
    stored = [(part, name, p) for part in module.modules() for name, p in part._parameters.items() if _is_dtensor(p)]
    try:
        for part, name, parameter in stored:
            assert parameter is not None
            one = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
            part._parameters[name] = nn.Parameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)
        yield
    finally:
        for part, name, parameter in stored:
            stand_in = part._parameters[name]
            assert parameter is not None
            assert stand_in is not None
            parameter.requires_grad_(stand_in.requires_grad)
            part._parameters[name] = parameter


def _is_dtensor(parameter: nn.Parameter | None) -> bool:
    return isinstance(parameter, DTensor)


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
