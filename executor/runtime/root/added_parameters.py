"""Parameters that are added to a sharded module, such as adapters: replicated DTensors with reduced gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from executor.runtime.root.sharded_root import root_of
from planner.errors import PlanMismatchError


def shard_added_parameters(module: nn.Module) -> nn.Module:
    """Return ``module``, in which every plain parameter has become a replicated DTensor. All ranks call this together.

    Call it after parameters were added to a sharded module, and before an optimizer is made of them: the parameters are
    new objects, with the values of rank 0. The plan does not have them: its estimates and its verification do not count
    them.

    Args:
        module: the result of ``shard_module``, or a module around it.

    Raises:
        PlanMismatchError: there is no sharded module in ``module``, or adapters have the size of a shard.
    """
    _, root = root_of(module)
    _check_adapters(module)
    placed: dict[nn.Parameter, nn.Parameter] = {}
    layout = (Replicate(),) * root.redistributor.device_mesh.ndim
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                continue
            if parameter not in placed:
                tensor = distribute_tensor(parameter.detach().contiguous(), root.redistributor.device_mesh, layout)
                placed[parameter] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            part.register_parameter(name, placed[parameter])
    root.reduction.attach(placed.values())
    return module


def _check_adapters(module: nn.Module) -> None:
    """Raise an error for adapters that peft has sized by the local tensor of a sharded weight."""
    wrong = [
        name
        for name, part in module.named_modules()
        if isinstance(base := getattr(part, "base_layer", None), nn.Linear)
        and (getattr(part, "in_features", None), getattr(part, "out_features", None))
        not in ((base.in_features, base.out_features), (None, None))
    ]
    if wrong:
        raise PlanMismatchError(
            f"{len(wrong)} adapters have the size of this rank's shard of the weight: {', '.join(wrong[:4])}.",
            subject="module",
            expected="adapters of whole weights",
            found="adapters that get_peft_model made of a sharded module",
            what_to_do="Call executor.add_adapters(model, config) in place of get_peft_model, or get_peft_model before "
            "build_plan.",
        )


def refuse_plain_parameters(module: nn.Module) -> None:
    """Make a forward of the sharded ``module`` raise an error if trainable plain parameters were added to it."""
    before = sum(not isinstance(parameter, DTensor) for parameter in module.parameters())
    module.register_forward_pre_hook(_PlainParameters(before), prepend=True)


class _PlainParameters:
    """A forward pre-hook on the root; ``before`` plain parameters belong to Sharders, or to a plan that shards none."""

    def __init__(self, before: int) -> None:
        self._before = before

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        plain = [name for name, p in module.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
        if len(plain) > self._before:
            raise PlanMismatchError(
                f"{len(plain)} trainable parameters are plain tensors, whose gradients nothing would reduce: "
                f"{', '.join(plain[-4:])}.",
                subject="module",
                expected="DTensors",
                found="parameters that were added after shard_module",
                what_to_do="Call executor.shard_added_parameters(model), and make the optimizer after it; for "
                "adapters of peft, executor.add_adapters(model, config) in place of get_peft_model.",
            )
