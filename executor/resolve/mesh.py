"""The device mesh of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from executor.torch_internals.gloo import run_one_worker_per_gloo_group
from planner.plan.sharding_plan import ShardingPlan

# On import, because whoever runs a plan imports the executor before the default process group exists.
run_one_worker_per_gloo_group()


@dataclass(slots=True)
class _Meshes:
    """The meshes over the ranks of one default process group, by device type, shape and names of axes."""

    default_group: dist.ProcessGroup | None = None
    by_key: dict[tuple[str, tuple[int, ...], tuple[str, ...]], DeviceMesh] = field(default_factory=dict)


_meshes = _Meshes()
"""Global, because the default process group is: each mesh has process groups of its own, with threads or buffers."""


def device_mesh_for(plan: ShardingPlan, *, device_type: str | None = None) -> DeviceMesh:
    """Return the mesh of ``plan`` over the ranks of the default process group; the same one for plans of equal meshes.

    Args:
        plan: its mesh has the names and sizes of axes, and the device type.
        device_type: replaces the plan's device type, to try a plan for GPUs on CPUs; None: the plan's.
    """
    key = (device_type or plan.mesh.device, tuple(plan.mesh.shape), tuple(plan.mesh.names))
    if not dist.is_initialized() or dist.group.WORLD is not _meshes.default_group:
        _meshes.by_key.clear()
    if key not in _meshes.by_key:
        _meshes.by_key[key] = init_device_mesh(key[0], key[1], mesh_dim_names=key[2])
        _meshes.default_group = dist.group.WORLD
    return _meshes.by_key[key]
