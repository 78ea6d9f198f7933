"""`mesh_spec_of`: the mesh of a plan that runs on a `DeviceMesh`."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from cost_model.layouts.layout import MeshSpec
from planner.errors import MeshError


def mesh_spec_of(mesh: DeviceMesh) -> MeshSpec:
    """Return the names and sizes of the axes of ``mesh``.

    Raises:
        MeshError: the axes have no names.
    """
    names, shape = mesh.mesh_dim_names, tuple(mesh.shape)
    if names is None:
        raise MeshError(
            f"the axes of the DeviceMesh of shape {shape} have no names.",
            what_to_do='Name them, for example init_device_mesh(..., mesh_dim_names=("dp", "tp")).',
        )
    return MeshSpec(axes=tuple(zip(names, shape, strict=True)))
