"""The mesh of a plan that was written for another library, and the plan converted for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from executor.resolve.mesh import device_mesh_for
from planner.errors import PlanMismatchError, PlanTypeError
from planner.imported.imported_plan import ImportedPlan
from planner.imported.sharding_specs import check_ranks, is_foreign, plan_from_specs, spec_device
from planner.imported.torch_shard import ShardingPlan as TorchShardingPlan
from planner.plan.mesh import UNSTATED, PlanMesh
from planner.plan.sharding_plan import ShardingPlan

P = ParamSpec("P")

AXIS = "shard"
"""Name of the axis of a mesh that a process group or ``ChunkShardingSpec``s give."""


def plan_mesh(mesh: DeviceMesh) -> PlanMesh:
    """Return ``mesh`` as a plan names it; axes without names are called axis0, axis1, ..."""
    shape = tuple(mesh.shape)
    names = mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(len(shape)))
    return PlanMesh(axes=tuple(zip(names, shape, strict=True)), device=mesh.device_type)


def imported_plan(module: nn.Module, mesh: DeviceMesh, plan: Any) -> ImportedPlan:
    """Return ``plan``, torch's or one of ours without a mesh, converted for ``mesh``."""
    ranks = [int(rank) for rank in mesh.mesh.flatten()] if mesh.ndim == 1 else None
    return plan_from_specs(module, plan, mesh=plan_mesh(mesh), ranks=ranks)


def mesh_of_group(module: nn.Module, plan: Any, group: dist.ProcessGroup | None) -> DeviceMesh:
    """Return the mesh of one axis over the ranks of ``group``; None: all ranks.

    Raises:
        PlanMismatchError: this rank is not in the group.
        PlanLayoutError: the specs of ``plan`` name ranks more than once, or differ.
    """
    check_ranks(plan)
    parameter = next(module.parameters(), None)
    fallback = "cpu" if parameter is None or parameter.is_meta else parameter.device.type
    device = spec_device(plan) or fallback
    if group is None:
        return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=(AXIS,))
    if dist.get_rank(group) < 0:
        ranks = dist.get_process_group_ranks(group)
        raise PlanMismatchError(
            f"Rank {dist.get_rank()} is not in the process group, whose ranks are {ranks}.",
            subject="process group",
            expected=f"one of the ranks {ranks}",
            found=f"rank {dist.get_rank()}",
            what_to_do="Call shard_module on the ranks of the group only.",
        )
    return DeviceMesh.from_group(group, device, mesh_dim_names=(AXIS,))


def accepts_other_plans(shard: Callable[P, nn.Module]) -> Callable[P, nn.Module]:
    """Return ``shard(module, device_mesh, plan, ...)``, which then takes the calls of other libraries as well.

    - ``shard_module(module, plan, src_rank=0, process_group=None)``, as in ``torch.distributed._shard``;
    - ``shard_module(module, device_mesh, sharding_plan=plan)``, as in HyperParallel;
    - torch's plans, and plans of ours without a mesh or with torch's values, in every call.
    """

    @functools.wraps(shard)
    def call(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
        mesh, plan, options = _arguments(module, args, options)
        if is_foreign(plan):
            imported = imported_plan(module, mesh, plan)
            plan = imported.plan
            if imported.sharders:
                options["sharders"] = {**imported.sharders, **(options.get("sharders") or {})}
        result: nn.Module = shard(module, mesh, plan, **options)  # type: ignore[arg-type]
        return result

    return cast(Callable[P, nn.Module], call)


def _arguments(
    module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[DeviceMesh, Any, dict[str, Any]]:
    """Return device mesh, plan and keyword arguments of a call in any of the forms of `accepts_other_plans`."""
    options = dict(options)
    if "sharding_plan" in options:
        options["plan"] = options.pop("sharding_plan")
    by_torch = not (args and isinstance(args[0], DeviceMesh)) and not isinstance(options.get("device_mesh"), DeviceMesh)
    names = ("plan", "src_rank", "process_group") if by_torch else ("device_mesh", "plan")
    if len(args) > len(names):
        raise TypeError(f"shard_module takes at most {len(names)} arguments by position after the module")
    for name, value in zip(names, args, strict=False):
        if name in options:
            raise TypeError(f"shard_module got multiple values for argument {name!r}")
        options[name] = value
    plan, mesh = options.pop("plan", None), options.pop("device_mesh", None)
    if not isinstance(plan, (ShardingPlan, TorchShardingPlan)):
        raise PlanTypeError(
            f"shard_module got {type(plan).__name__} as its plan.",
            what_to_do="Call shard_module(module, device_mesh, plan), or shard_module(module, plan) as in torch.",
        )
    if mesh is None:
        group = options.pop("process_group", None)
        if isinstance(plan, ShardingPlan) and plan.mesh != UNSTATED and group is None:
            mesh = device_mesh_for(plan)
        else:
            mesh = mesh_of_group(module, plan, group)
        # torch's rank counts within its group, as ours along the axis.
        options.setdefault("src_data_rank", options.pop("src_rank", 0))
    return mesh, plan, options
