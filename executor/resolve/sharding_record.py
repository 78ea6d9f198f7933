"""`plan_of`, `mesh_of`: the plan and the device mesh that a module was sharded with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from planner.errors import PlanError
from planner.plan.sharding_plan import ShardingPlan

_ATTRIBUTE = "_sharding_record"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardingRecord:
    plan: ShardingPlan
    mesh: DeviceMesh

    def __deepcopy__(self, memo: dict[int, Any]) -> _ShardingRecord:
        """Return this record: a copy of a module is on the same ranks."""
        return self


def recorded(module: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> nn.Module:
    """Return ``module``, which was sharded with ``plan`` on ``mesh``, with both for `plan_of` and `mesh_of`."""
    object.__setattr__(module, _ATTRIBUTE, _ShardingRecord(plan=plan, mesh=mesh))
    return module


def plan_of(module: nn.Module) -> ShardingPlan:
    """Return the plan that ``module`` was sharded with.

    Raises:
        PlanError: the module is not sharded.
    """
    return _record(module).plan


def mesh_of(module: nn.Module) -> DeviceMesh:
    """Return the device mesh that ``module`` was sharded on.

    Raises:
        PlanError: the module is not sharded.
    """
    return _record(module).mesh


def _record(module: nn.Module) -> _ShardingRecord:
    record = module.__dict__.get(_ATTRIBUTE)
    if not isinstance(record, _ShardingRecord):
        raise PlanError(
            f"This {type(module).__name__} is not sharded.",
            what_to_do="Give the module that auto_parallelize or shard_module returned.",
        )
    return record
