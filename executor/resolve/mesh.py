"""The device mesh of a plan."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner.plan.sharding_plan import ShardingPlan


def device_mesh_for(plan: ShardingPlan, *, device_type: str | None = None) -> DeviceMesh:
    """Return the mesh of ``plan`` over the ranks of the default process group.

    Args:
        plan: its mesh has the names and sizes of axes, and the device type.
        device_type: replaces the plan's device type, to try a plan for GPUs on CPUs; None: the plan's.
    """
    return init_device_mesh(device_type or plan.mesh.device, plan.mesh.shape, mesh_dim_names=plan.mesh.names)
