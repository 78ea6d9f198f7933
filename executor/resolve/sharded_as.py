"""`plan_of`, `mesh_of`: the plan and the mesh that a module was sharded with; `not_sharded`, the error of any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from planner.errors import PlanMismatchError
from planner.plan.sharding_plan import ShardingPlan

_ATTRIBUTE = "sharded_as"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedAs:
    """The plan and the mesh of a sharded module; copies of the module share them."""

    plan: ShardingPlan
    device_mesh: DeviceMesh

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedAs:
        return self


def remember(module: nn.Module, device_mesh: DeviceMesh, plan: ShardingPlan) -> nn.Module:
    """Return ``module``, which from now on knows the plan and the mesh that it was sharded with."""
    setattr(module, _ATTRIBUTE, ShardedAs(plan=plan, device_mesh=device_mesh))
    return module


def sharded_as(module: nn.Module) -> ShardedAs:
    """Return the plan and the mesh that ``module`` was sharded with.

    Raises:
        PlanMismatchError: neither `shard_module` nor `auto_parallelize` returned this module.
    """
    found = getattr(module, _ATTRIBUTE, None)
    if not isinstance(found, ShardedAs):
        raise not_sharded(module)
    return found


def not_sharded(module: nn.Module) -> PlanMismatchError:
    """Return the error of a call that needs a sharded module, and got ``module``."""
    name = type(module).__name__
    return PlanMismatchError(
        f"This {name} is no sharded module.",
        subject="module",
        expected="a module that shard_module or auto_parallelize returned",
        found=name,
        what_to_do="Give the module that auto_parallelize or shard_module returned, not a part of it.",
    )


def plan_of(module: nn.Module) -> ShardingPlan:
    """Return the plan that ``module`` was sharded with.

    Raises:
        PlanMismatchError: as `sharded_as`.
    """
    return sharded_as(module).plan


def mesh_of(module: nn.Module) -> DeviceMesh:
    """Return the device mesh that ``module`` was sharded on.

    Raises:
        PlanMismatchError: as `sharded_as`.
    """
    return sharded_as(module).device_mesh
