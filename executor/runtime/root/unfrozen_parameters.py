"""An error where a parameter that was frozen, and stored in the compute dtype, is to be trained later."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from planner.errors import PlanMismatchError


def refuse_unfrozen(module: nn.Module, narrowed: Collection[nn.Parameter]) -> None:
    """Make a forward of ``module`` that trains one of ``narrowed`` raise an error.

    Args:
        module: the root module.
        narrowed: the frozen parameters that sharding has stored in a narrower dtype.
    """

    def check(*unused: Any) -> None:
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in narrowed):
            unfrozen = [name for name, p in module.named_parameters() if p in narrowed and p.requires_grad]
            dtype = module.get_parameter(unfrozen[0]).dtype
            raise PlanMismatchError(
                f"{len(unfrozen)} parameters were frozen when the module was sharded, and are to be trained now: "
                f"{unfrozen[0]!r} first. They are stored in {dtype}, without the wider copy that small updates need.",
                subject="module",
                expected="frozen parameters",
                found="parameters with gradients",
                what_to_do="Plan and shard the module while they are trainable, and freeze them afterwards.",
            )

    if narrowed:
        module.register_forward_pre_hook(check)
