"""Copies of a sharded module, by ``copy.deepcopy``: right with most plans, an error with FSDP groups."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from planner.errors import PlanMismatchError


def refuse_copies(module: nn.Module) -> None:
    """Make ``copy.deepcopy`` of ``module``, which has FSDP groups, raise an error that says how to average parameters.

    torch's ``fully_shard`` cannot be copied.
    """
    module.__dict__["__deepcopy__"] = _RefuseCopy(type(module).__name__)


class _RefuseCopy:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, memo: dict[int, Any]) -> NoReturn:
        raise PlanMismatchError(
            f"A sharded {self._name} with FSDP groups cannot be copied, and AveragedModel would copy it.",
            subject="module",
            expected="a module without FSDP groups",
            found="FSDP groups, which torch's fully_shard does not copy",
            what_to_do="Shard a second module with the same plan, `shard_module(second, mesh_of(module), "
            "plan_of(module))`, and copy the values by `second.load_state_dict(module.state_dict())`. To average "
            "parameters, `lerp_` those of the second towards those of the first after each step, under no_grad.",
        )
